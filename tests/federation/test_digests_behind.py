"""Digests of files that are still written are those of the files, in whatever order they come."""

import os
import random

import pytest
import torch

from atoll.federation.digests_behind import DigestsBehind
from atoll.federation.tensors import STRETCH, TensorWriter, stretches, typed
from atoll.run_dir import sha256_of

LAYOUT = {
    "model-1.safetensors": {"a": (STRETCH + 5,), "b": (3, 7)},
    "model-2.safetensors": {"c": (2, STRETCH)},
}


def written(folder, order):
    """The digests, and how far the first file was read when its first stretch was there."""
    layout = {file: dict(tensors) for file, tensors in typed(LAYOUT, torch.float32).items()}
    layout["model-1.safetensors"]["counts"] = (torch.int64, (4,))
    early = []
    with TensorWriter(folder, layout) as writer:
        behind = DigestsBehind(writer, LAYOUT)
        for number, stretch in enumerate(order):
            writer.put(stretch, torch.full((stretch.count,), float(number)))
            behind.add(stretch)
            early.append(behind.places[folder / "model-1.safetensors"])
        return behind.digests(), early[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_digests_are_those_of_the_files(tmp_path, seed):
    order = list(stretches(LAYOUT))
    random.Random(seed).shuffle(order)
    digests, _ = written(tmp_path, order)
    assert digests == {path.name: sha256_of(path) for path in tmp_path.iterdir()}


def test_what_comes_in_order_is_read_at_once(tmp_path):
    digests, early = written(tmp_path, stretches(LAYOUT))
    assert early > 4 * STRETCH
    assert digests == {path.name: sha256_of(path) for path in tmp_path.iterdir()}


def test_a_file_that_is_cut_meanwhile_ends_it(tmp_path):
    with TensorWriter(tmp_path, typed(LAYOUT, torch.float32)) as writer:
        behind = DigestsBehind(writer, LAYOUT)
        stretch = next(stretches(LAYOUT))
        writer.put(stretch, torch.ones(stretch.count))
        os.truncate(tmp_path / "model-1.safetensors", 100)
        with pytest.raises(OSError, match="ends at byte 100"):
            behind.add(stretch)
