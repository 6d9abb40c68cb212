"""Samples in windows of shards: one order whatever is ready, of one text or several."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_runs import make_run, prose

from atoll import run_dir
from atoll.data import shards, waits
from atoll.data.loader import batches_ahead
from atoll.data.tokenize import prepare
from atoll.data.waits import refuse_missing, waits_for_job
from atoll.data.windows import TextWindows, Windows
from atoll.errors import UserError
from atoll.health.heartbeat import unwatched
from atoll.settings import Run

BATCH = 4


def windowed(folder: Path, **data: object) -> Run:
    """Ten shards of twenty documents; the last window is one shard."""
    text = folder / "text.txt"
    text.write_text("\n".join(prose(n, 1 + (n * 7) % 60) for n in range(200)))
    values = {"files": [str(text)], "document": "line", "documents_per_shard": 20}
    return make_run(folder, values | {"sequence_tokens": 48, "window_shards": 3} | data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("windows")
    run = windowed(folder)
    return run, prepare(run, print)


@pytest.fixture
def under_way(whole: tuple[Run, Path], tmp_path: Path) -> Callable[[int], tuple[Run, Path]]:
    """The folder as it was when so many shards of training text were whole."""

    def begun(shard_count: int) -> tuple[Run, Path]:
        run, folder = whole
        folders = run.folders.model_copy(update={"prepared": tmp_path / "prepared"})
        run = run.model_copy(update={"folders": folders})
        copy = run_dir.prepared(run)
        shutil.copytree(folder, copy)
        shards.manifest_file(copy).unlink()
        for number in range(shard_count, 10):
            for split in shards.SPLITS:
                shards.record_file(copy, split, number).unlink()
        return run, copy

    return begun


def drawn(opened: Windows, batches: range) -> list[list[list[int]]]:
    """The tokens of each sample of some batches."""
    each = [opened.draw(BATCH * number) for number in batches]
    return [batch.samples.batch(batch.ids).tokens_BT.tolist() for batch in each]


def sizes_of(text: TextWindows) -> list[int]:
    """The samples of each window."""
    text.find(10**6)
    return [text.size(n) for n in range(text.count)]


def test_windows_follow_one_another_and_each_gives_all_its_samples(whole: tuple[Run, Path]) -> None:
    run, _ = whole
    [text] = Windows(run, refuse_missing).texts
    sizes = sizes_of(text)
    assert text.count == 4 == len(sizes) and sizes[0] > sizes[3] > 0
    assert [len(part) for _, part in text.take(0, sum(sizes))] == sizes
    for window, ids in text.take(0, sum(sizes)):
        assert sorted(ids) == list(range(sizes[window])) != ids.tolist()
    [(_, first)], [(_, again)] = text.take(0, 9), text.take(sum(sizes), 9)
    assert first.tolist() != again.tolist(), "each epoch has an order of its own"
    inside = text.take(sizes[0] - 2, 5)
    assert [(window, len(ids)) for window, ids in inside] == [(0, 2), (1, 3)]
    assert text.epochs(sum(sizes)) == 1.0 and text.epochs(sum(sizes[:2])) == 0.6


def test_another_seed_of_the_order_moves_no_sample_to_what_is_held_out(
    whole: tuple[Run, Path],
) -> None:
    """As facilities of one campaign have them, that may have the same text."""
    run, folder = whole
    training = run.training.model_copy(update={"data_seed": run.seed + 1})
    other = run.model_copy(update={"training": training})
    assert run_dir.prepared(other) == folder
    [here], [there] = Windows(run, refuse_missing).texts, Windows(other, refuse_missing).texts
    size = sizes_of(here)[0]
    [(_, ids)], [(_, others)] = here.take(0, size), there.take(0, size)
    assert ids.tolist() != others.tolist() and sorted(ids) == sorted(others)
    same = run.model_copy(
        update={"training": run.training.model_copy(update={"data_seed": run.seed})}
    )
    [again] = Windows(same, refuse_missing).texts
    assert [ids.tolist() for _, ids in again.take(0, size)] == [ids.tolist()]


def test_the_order_is_the_same_whatever_is_ready_and_wherever_a_run_begins(
    whole: tuple[Run, Path], under_way: Callable[[int], tuple[Run, Path]]
) -> None:
    run, _ = whole
    in_all = sum(sizes_of(Windows(run, refuse_missing).texts[0])) // BATCH
    expected = drawn(Windows(run, refuse_missing), range(2 * in_all))
    early, folder = under_way(3)

    def made(missing: str) -> None:
        """The next three shards."""
        for number in range(int(missing.split()[1]) - 1, 10)[:3]:
            for split in shards.SPLITS:
                source = shards.record_file(run_dir.prepared(run), split, number)
                shutil.copy(source, shards.record_file(folder, split, number))

    opened = Windows(early, made)
    assert drawn(opened, range(2 * in_all)) == expected
    held_out = opened.validation()
    assert held_out.batch(np.arange(len(held_out))).tokens_BT.tolist() == (
        Windows(run, refuse_missing).validation().batch(np.arange(len(held_out))).tokens_BT.tolist()
    )
    later = Windows(run, refuse_missing)
    assert drawn(later, range(in_all + 3, in_all + 5)) == expected[in_all + 3 : in_all + 5]


def test_ranks_share_a_batch_as_they_do_without_windows(whole: tuple[Run, Path]) -> None:
    run, _ = whole
    opened = Windows(run, refuse_missing)
    with batches_ahead(opened, run, BATCH, 3, 0) as batches:
        shares = list(batches)
    tokens = [
        [row for part in share.microbatches for row in part.tokens_BT.tolist()] for share in shares
    ]
    assert tokens == drawn(opened, range(1, 4))
    assert all(share.global_useful and share.global_targets for share in shares)


def test_held_out_text_of_its_own_is_there_before_the_first_window(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("\n".join(prose(900 + n, 20) for n in range(60)))
    run = windowed(tmp_path, validation={"files": [str(held_out)]})
    lines: list[str] = []
    folder = prepare(run, lines.append)
    records = [shards.record_file(folder, *each).stat().st_mtime_ns for each in
               [("validation", 2), ("train", 0)]]  # fmt: skip
    assert records[0] < records[1]
    assert Windows(run, refuse_missing).manifest.documents("validation") == 60


def test_tokens_of_an_earlier_version_are_read_too(
    whole: tuple[Run, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = whole
    plan, manifest = shards.read_plan(folder), shards.read_manifest(folder)
    assert plan is not None and plan.shard_counts == {"train": 10, "validation": 10}
    old = {"shard_counts": {}}
    files = {shards.plan_file: plan, shards.manifest_file: manifest}
    try:
        for file, record in files.items():
            record.model_copy(update=old).write(file(folder))
        assert sizes_of(Windows(run, refuse_missing).texts[0])[3] > 0
    finally:
        for file, record in files.items():
            record.write(file(folder))


def test_a_shard_that_changed_ends_the_rank_that_looks_at_it(
    under_way: Callable[[int], tuple[Run, Path]],
) -> None:
    run, folder = under_way(10)
    path = shards.tokens_file(folder, "train", 4)
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    opened = Windows(run, refuse_missing)
    with pytest.raises(UserError, match=r"00004\.ds is corrupted"):
        sizes_of(opened.texts[0])


def test_a_shard_that_nobody_makes_is_named(
    under_way: Callable[[int], tuple[Run, Path]],
) -> None:
    run, _ = under_way(2)
    with pytest.raises(UserError, match=r"shard 3 of 10 \(validation\) of .* is missing"):
        Windows(run, refuse_missing)


@pytest.mark.parametrize(
    ("data", "others", "words"),
    [
        (
            {"sources": [{"name": "a", "files": "b.txt", "max_epochs": 1}], "files": []},
            {},
            "with max_epochs of source a",
        ),
        ({"format": "preference"}, {}, "with data.format=preference"),
        ({}, {"training": {"epochs": 2, "steps": None}}, "training.epochs=2 with"),
        ({}, {"evaluation": {"every_epochs": 1}}, "evaluation.every_epochs=1 with"),
    ],
)
def test_settings_that_do_not_go_with_windows(
    tmp_path: Path, data: dict[str, object], others: dict[str, dict[str, object]], words: str
) -> None:
    training = {"steps": 2, "global_batch_samples": 4, "microbatch_samples": 2}
    others = {"training": training, **others}
    others["training"] = training | others["training"]
    values = {"files": ["a.txt"], "window_shards": 2} | data
    with pytest.raises(UserError, match=words):
        make_run(tmp_path, values, **others)


def test_tokens_do_not_depend_on_the_window(whole: tuple[Run, Path]) -> None:
    run, folder = whole
    other = run.data.model_copy(update={"window_shards": None})
    assert run_dir.prepared(run.model_copy(update={"data": other})) == folder


def test_a_rank_waits_as_long_as_the_job_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.0)
    said: list[str] = []
    alive: list[int] = []
    wait = waits_for_job(tmp_path, lambda: alive.append(1), said.append)
    run_dir.write_whole(run_dir.preparing_file(tmp_path), "running\n")
    for _ in range(3):
        wait("shard 3")
    wait("shard 4")
    assert len(alive) == 4
    assert said == [f"waiting for shard {n}: it is being prepared …" for n in (3, 4)]
    run_dir.write_whole(run_dir.preparing_file(tmp_path), "failed\n")
    with pytest.raises(UserError, match="shard 4 is missing, and its preparation failed"):
        wait("shard 4")


def test_a_rank_gives_another_node_time_to_show_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.0)
    wait = waits_for_job(tmp_path, lambda: None, lambda line: None)
    wait("shard 3")
    monkeypatch.setattr(waits, "SETTLE_SECONDS", 0.0)
    with pytest.raises(UserError, match="shard 3 is missing"):
        wait("shard 3")


def test_a_wait_for_input_is_no_stall_and_hides_none_elsewhere() -> None:
    heartbeat = unwatched(0)

    def moved() -> float:
        return float(heartbeat._floats[16])

    for phase, counts in {"input": True, "communication": False, "start": True}.items():
        heartbeat.at(phase)  # type: ignore[arg-type]
        heartbeat._floats[16] = 1.0
        heartbeat.waits_for_input()
        assert (moved() > 1.0) == counts, phase


def test_windows_of_a_text_that_another_run_made_anew_are_not_read(tmp_path: Path) -> None:
    run = windowed(tmp_path)
    prepare(run, print)
    opened = Windows(run, refuse_missing)
    drawn(opened, range(1))
    other = run.model_copy(update={"name": "another"})
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() + "one line more\n")
    prepare(other, print)
    with pytest.raises(UserError, match="were made again, of another text, while this run reads"):
        drawn(opened, range(200))
