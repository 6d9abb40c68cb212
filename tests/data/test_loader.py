"""Batches: labels and positions that stop at the borders of documents."""

import itertools
import threading
from pathlib import Path
from typing import Any

import defaults
import numpy as np
import pytest
import torch
from data_runs import make_run, prose

from atoll.data import samples as samples_module
from atoll.data import shards
from atoll.data.loader import batches_ahead
from atoll.data.samples import Samples, open_samples
from atoll.data.tokenize import prepare
from atoll.errors import UserError
from atoll.settings import Run

SEQUENCE = 48
WAYS = [
    {"batching": "packing", "packing": "best_fit"},
    {"batching": "packing", "packing": "concat"},
    {"batching": "padding"},
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Tokens of documents shorter and longer than a sample, in several shards."""
    tmp_path = tmp_path_factory.mktemp("prepared")
    lines = [prose(n, 1 + (n * 7) % 60) for n in range(90)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    data = {"files": [str(tmp_path / "text.txt")], "document": "line", "documents_per_shard": 20}
    run = make_run(tmp_path, data | {"sequence_tokens": SEQUENCE})
    return run, prepare(run, print)


def opened(prepared: tuple[Run, Path], way: dict[str, Any]) -> Samples:
    run, folder = prepared
    return open_samples(run.data.model_copy(update=way), folder, "train")


def documents(folder: Path) -> list[list[int]]:
    found: list[list[int]] = []
    for path in sorted((folder / "train").glob("*.ds")):
        ends = np.fromfile(f"{path}.index", dtype="<u8").astype(int)
        found += [part.tolist() for part in np.split(np.fromfile(path, "<u2"), ends[:-1])]
    return found


def pieces_of(samples: Samples, ids: np.ndarray) -> list[list[int]]:
    """The segments of a batch that are not padding, in order; checks the whole batch by the way."""
    batch = samples.batch(ids)
    tokens, labels = batch.tokens_BT.flatten(), batch.labels_BT.flatten()
    positions = batch.positions_BT.flatten()
    ends = batch.segment_ends.tolist()
    assert batch.tokens_BT.shape == (len(ids), SEQUENCE)
    assert {batch.tokens_BT.dtype, batch.labels_BT.dtype, batch.positions_BT.dtype} == {torch.int64}
    assert batch.segment_ends.dtype == torch.int32
    assert (ends[0], ends[-1]) == (0, tokens.numel())
    assert set(range(0, tokens.numel() + 1, SEQUENCE)) <= set(ends)
    assert batch.segment_lengths == tuple(b - a for a, b in itertools.pairwise(ends))
    useful = samples.useful(ids)
    found = []
    for start, end in itertools.pairwise(ends):
        assert positions[start:end].tolist() == list(range(end - start))
        if start % SEQUENCE >= useful[start // SEQUENCE]:
            assert (labels[start:end] == -100).all()
            continue
        assert labels[start : end - 1].tolist() == tokens[start + 1 : end].tolist()
        assert labels[end - 1] == -100
        found.append(tokens[start:end].tolist())
    assert batch.useful_tokens == sum(map(len, found)) == int(useful.sum())
    assert int((labels != -100).sum()) == int(samples.targets(ids).sum())
    return found


def joined(pieces: list[list[int]]) -> list[int]:
    return list(itertools.chain(*pieces))


@pytest.mark.parametrize("way", WAYS)
def test_batches_hold_the_documents_and_nothing_else(
    prepared: tuple[Run, Path], way: dict[str, Any]
) -> None:
    samples = opened(prepared, way)
    expected = documents(prepared[1])
    pieces: list[list[int]] = []
    for first in range(0, len(samples), 5):
        pieces += pieces_of(samples, np.arange(first, min(first + 5, len(samples))))
    if way["batching"] == "padding":
        assert pieces == [document[:SEQUENCE] for document in expected]
        return
    assert sorted(joined(pieces)) == sorted(joined(expected))
    if way["packing"] == "best_fit":
        cut = [d[a : a + SEQUENCE] for d in expected for a in range(0, len(d), SEQUENCE)]
        assert sorted(pieces) == sorted(cut)
    else:
        assert joined(pieces) == joined(expected)


@pytest.mark.parametrize("way", WAYS)
def test_any_samples_make_a_batch(prepared: tuple[Run, Path], way: dict[str, Any]) -> None:
    samples = opened(prepared, way)
    ids = np.array([len(samples) - 1, 0, 3, 0])
    one_by_one = [pieces_of(samples, ids[n : n + 1]) for n in range(4)]
    assert pieces_of(samples, ids) == list(itertools.chain(*one_by_one))


def test_few_open_files_serve_many_shards(
    prepared: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(8)
    expected = opened(prepared, WAYS[0]).batch(ids).tokens_BT
    monkeypatch.setattr(samples_module, "OPEN_SHARDS", 1)
    assert torch.equal(opened(prepared, WAYS[0]).batch(ids).tokens_BT, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_see_the_same_batches(prepared: tuple[Run, Path], ranks: int) -> None:
    run, _ = prepared
    samples = opened(prepared, WAYS[0])
    sharding = {"name": "ddp", "layouts": ["ddp"]}
    wide = run.model_validate(
        run.model_dump() | {"ranks_per_node": ranks, "sharding": sharding}
        | {"training": defaults.group("training", global_batch_samples=8, microbatch_samples=2)}
    )  # fmt: skip
    rows: list[list[list[int]]] = [[], [], []]
    totals = []
    for rank in range(ranks):
        with batches_ahead(samples, wide, 16, 3, rank) as shares:
            for step, share in enumerate(shares):
                assert len(share.microbatches) == 4 // ranks
                for batch in share.microbatches:
                    rows[step] += batch.tokens_BT.tolist()
                totals.append((step, share.global_targets, share.global_useful))
    alone = run.model_copy(update={"training": wide.training})
    with batches_ahead(samples, alone, 16, 3, 0) as shares:
        for step, share in enumerate(shares):
            expected = [row for batch in share.microbatches for row in batch.tokens_BT.tolist()]
            labels = torch.cat([batch.labels_BT for batch in share.microbatches])
            useful = sum(batch.useful_tokens for batch in share.microbatches)
            assert sorted(rows[step]) == sorted(expected)
            counted = {(targets, used) for at, targets, used in totals if at == step}
            assert counted == {(int((labels != -100).sum()), useful)}


def test_a_position_is_all_the_state(prepared: tuple[Run, Path]) -> None:
    run, _ = prepared
    samples = opened(prepared, WAYS[0])
    size = run.training.global_batch_samples

    def tokens(position: int, steps: int) -> list[torch.Tensor]:
        with batches_ahead(samples, run, position, steps, 0) as shares:
            return [batch.tokens_BT for share in shares for batch in share.microbatches]

    whole, resumed = tokens(0, 40), tokens(25 * size, 15)
    assert len(samples) < 40 * size, "the order goes through more than one epoch"
    assert torch.equal(torch.stack(whole[-len(resumed) :]), torch.stack(resumed))


def test_an_error_of_the_thread_is_raised_where_the_batch_is_asked_for(
    prepared: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = opened(prepared, WAYS[0])
    good = samples.batch
    calls = iter(range(100))

    def batch(ids: np.ndarray) -> Any:
        if next(calls) == 4:
            raise OSError("the disk is gone")
        return good(ids)

    monkeypatch.setattr(samples, "batch", batch)
    with batches_ahead(samples, prepared[0], 0, 10, 0) as shares:
        assert len(next(shares).microbatches) == 2
        next(shares)
        with pytest.raises(OSError, match="the disk is gone"):
            next(shares)


def test_leaving_early_ends_the_thread(prepared: tuple[Run, Path]) -> None:
    before = threading.active_count()
    with batches_ahead(opened(prepared, WAYS[0]), prepared[0], 0, 1000, 0) as shares:
        next(shares)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_damaged_index_is_named(prepared: tuple[Run, Path]) -> None:
    run, folder = prepared
    path = shards.index_file(folder, "train", 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + whole[:8] + whole[16:])
    try:
        with pytest.raises(UserError, match=r"train/00001\.ds\.index is corrupted"):
            open_samples(run.data, folder, "train")
    finally:
        path.write_bytes(whole)


def test_the_thread_that_pins_batches_takes_the_device_of_its_rank(
    prepared: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with a node's first device, where each rank would take memory."""
    taken = []

    def set_device(index: int) -> None:
        taken.append((index, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with batches_ahead(opened(prepared, WAYS[0]), prepared[0], 0, 2, 0) as shares:
        assert len(list(shares)) == 2
    assert taken == [(3, False)]


def test_tokens_that_another_run_makes_anew_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that is opened from then on would have other text at the places of the plan."""
    monkeypatch.setattr(samples_module, "OPEN_SHARDS", 1)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(prose(n, 30) for n in range(60)))
    data = {"files": [str(text)], "document": "line", "documents_per_shard": 20}
    run = make_run(tmp_path, data | {"sequence_tokens": SEQUENCE})
    samples = open_samples(run.data, prepare(run, print), "train")
    first = samples.batch(np.arange(1)).tokens_BT.tolist()
    other = run.model_copy(update={"name": "another"})
    prepare(other, print)
    samples.batch(np.array([len(samples) - 1]))
    assert samples.batch(np.arange(1)).tokens_BT.tolist() == first
    text.write_text("\n".join(prose(n + 7, 30) for n in range(60)))
    prepare(other, print)
    with pytest.raises(UserError, match="were made again, of another text, while this run reads"):
        samples.batch(np.array([len(samples) - 1]))


def test_what_padding_cuts_off_is_counted(prepared: tuple[Run, Path]) -> None:
    lengths = [len(document) for document in documents(prepared[1])]
    cut = sum(max(0, length - SEQUENCE) for length in lengths)
    assert opened(prepared, WAYS[2]).cut_tokens == cut > 0
    assert [opened(prepared, way).cut_tokens for way in WAYS[:2]] == [0, 0]
