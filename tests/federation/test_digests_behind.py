"""Digests of files that are still written are those of the files, in whatever order they come."""

import os
import random

import pytest
import torch

from atoll.federation import tensors
from atoll.federation.digests_behind import DigestsBehind
from atoll.federation.tensors import STRETCH, TensorReader, TensorWriter, stretches, typed
from atoll.run_dir import sha256_of

LAYOUT = {
    "model-1.safetensors": {"a": (STRETCH + 5,), "b": (3, 7)},
    "model-2.safetensors": {"c": (2, STRETCH)},
}


@pytest.fixture(params=["around the cache", "through the cache"])
def direct(request, monkeypatch):
    monkeypatch.setattr(tensors, "is_own_disk", lambda folder: True)
    return request.param == "around the cache"


def written(folder, order, direct, put=True):
    """The digests, and how far the first file was read when its first stretch was there."""
    layout = {file: dict(tensors) for file, tensors in typed(LAYOUT, torch.float32).items()}
    layout["model-1.safetensors"]["counts"] = (torch.int64, (4,))
    early = []
    with TensorWriter(folder, layout, direct=direct) as writer:
        assert (writer.direct is not None) is direct
        behind = DigestsBehind(writer, LAYOUT)
        for stretch in order:
            (behind if put else writer).put(stretch, values_of(stretch))
            behind.add(stretch)
            early.append(behind.places[folder / "model-1.safetensors"])
        return behind.digests(), early[0]


def values_of(stretch):
    return torch.arange(stretch.count, dtype=torch.float32) + stretch.first + ord(stretch.name)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_digests_are_those_of_the_files(tmp_path, seed, direct):
    order = list(stretches(LAYOUT))
    random.Random(seed).shuffle(order)
    digests, _ = written(tmp_path, order, direct)
    assert digests == {path.name: sha256_of(path) for path in tmp_path.iterdir()}
    with TensorReader(tmp_path) as reader:
        for stretch in order:
            torch.testing.assert_close(reader.values(stretch), values_of(stretch), rtol=0, atol=0)


def test_what_comes_in_order_is_read_at_once(tmp_path, direct):
    digests, early = written(tmp_path, stretches(LAYOUT), direct, put=False)
    assert early > 4 * STRETCH
    assert digests == {path.name: sha256_of(path) for path in tmp_path.iterdir()}


def test_of_what_is_put_in_order_headers_alone_are_read(tmp_path, direct, monkeypatch):
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *x: read.append(preadv(*x)) or read[-1])
    digests, early = written(tmp_path, stretches(LAYOUT), direct)
    assert early > 4 * STRETCH and sum(read) < 1024
    assert digests == {path.name: sha256_of(path) for path in tmp_path.iterdir()}


def test_a_file_that_is_cut_meanwhile_ends_it(tmp_path):
    with TensorWriter(tmp_path, typed(LAYOUT, torch.float32)) as writer:
        behind = DigestsBehind(writer, LAYOUT)
        stretch = next(stretches(LAYOUT))
        writer.put(stretch, torch.ones(stretch.count))
        os.truncate(tmp_path / "model-1.safetensors", 100)
        with pytest.raises(OSError, match="ends at byte 100"):
            behind.add(stretch)
