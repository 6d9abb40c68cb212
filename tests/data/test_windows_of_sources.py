"""Several texts in windows of shards: mixed by weight, each read as it is prepared."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_runs import make_run, prose

from atoll import run_dir
from atoll.data import shards
from atoll.data.tokenize import open_prepared, prepare
from atoll.data.waits import refuse_missing
from atoll.data.windows import Windows
from atoll.errors import UserError
from atoll.settings import Run

BATCH, STEPS = 8, 60


def in_windows(folder: Path, weights: tuple[Any, Any] = (3, 1), **data: Any) -> Run:
    """Short lines, and long ones, in windows of three shards of nine and seven."""
    for name, count, words in (("short", 180, 9), ("long", 140, 40)):
        lines = (prose(n, 1 + (n * 7) % (2 * words)) + f" {name}" for n in range(count))
        (folder / f"{name}.txt").write_text("\n".join(lines))
    sources = [
        {"name": name, "files": str(folder / f"{name}.txt"), "weight": weight}
        for name, weight in zip(("short", "long"), weights, strict=True)
    ]
    values = {"name": "mix", "document": "line", "documents_per_shard": 20, "window_shards": 3}
    training = {"steps": 2, "global_batch_samples": BATCH, "microbatch_samples": 2}
    values |= {"sequence_tokens": 48, "sources": sources, "workers": 1}
    return make_run(folder, values | data, training=training)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = in_windows(tmp_path_factory.mktemp("whole"))
    prepare(run, print)
    return run


def drawn(opened: Windows, first: int = 0) -> list[list[list[int]]]:
    """The tokens of each sample of the steps up to the last, from `first` on."""
    batches = [opened.draw(BATCH * step) for step in range(first, STEPS)]
    return [batch.samples.batch(batch.ids).tokens_BT.tolist() for batch in batches]


def test_weights_are_shares_of_tokens_and_each_source_is_read_in_its_windows(whole: Run) -> None:
    opened = Windows(whole, refuse_missing)
    useful, taken = np.zeros(2), [0, 0]
    for step in range(STEPS):
        batch = opened.draw(BATCH * step)
        names = [source.name for source in batch.samples.sources]
        for ids, name in zip(batch.samples.ids_of_sources, names, strict=True):
            own = batch.ids[np.isin(batch.ids, ids)]
            useful[int(name == "long")] += batch.samples.useful(own).sum()
            taken[int(name == "long")] += len(own)
    assert useful / useful.sum() == pytest.approx([0.75, 0.25], abs=0.02)
    behind = opened.draw(BATCH * (STEPS - 1)).epochs
    assert list(behind) == ["short", "long"]
    for text, samples in zip(opened.texts, taken, strict=True):
        text.find(10**6)
        assert behind[text.data.name] == pytest.approx(samples / text.ends[-1], rel=0.1)
    assert behind["short"] > 1, "it went through more than one epoch"


def test_a_source_is_read_as_a_run_on_it_alone(whole: Run) -> None:
    _, long = run_dir.source_runs(whole)
    alone = [row for rows in drawn(Windows(long, refuse_missing)) for row in rows]
    mixed = [row for rows in drawn(Windows(whole, refuse_missing)) for row in rows if row in alone]
    assert len(mixed) > 2 * BATCH
    assert mixed == alone[: len(mixed)]


def test_the_order_is_the_same_whatever_is_ready_and_wherever_a_run_begins(
    whole: Run, tmp_path: Path
) -> None:
    expected = drawn(Windows(whole, refuse_missing))
    folders = whole.folders.model_copy(update={"prepared": tmp_path / "prepared"})
    early = whole.model_copy(update={"folders": folders})
    shutil.copytree(whole.folders.prepared, folders.prepared)
    for record in folders.prepared.glob("*/*/*.json"):
        if record.stem.isdigit() and int(record.stem) >= 3:
            record.unlink()
    for folder in run_dir.prepared_sources(early):
        shards.manifest_file(folder).unlink()
    waited: list[str] = []

    def made(missing: str) -> None:
        waited.append(missing)
        found = re.match(r"shard (\d+) of \d+ \((\w+)\) of (.*)", missing)
        assert found is not None
        record = shards.record_file(Path(found[3]), found[2], int(found[1]) - 1)  # type: ignore[arg-type]
        shutil.copy(whole.folders.prepared / record.relative_to(folders.prepared), record)

    opened = Windows(early, made)
    assert waited == [], "the first window of each is enough to begin"
    assert drawn(opened) == expected
    assert {"short", "long"} == {re.split(r"[/-]", m.split("prepared/")[1])[0] for m in waited}
    assert drawn(Windows(whole, refuse_missing), 41) == expected[41:]
    held_out = Windows(whole, refuse_missing).validation()
    assert [source.name for source in held_out.sources] == ["short", "long"]


def test_a_batch_that_needs_another_window_says_so(whole: Run) -> None:
    opened = Windows(whole, refuse_missing)
    flags = []
    for step in range(STEPS):
        looked_at = [len(text.ends) for text in opened.texts]
        flags.append(opened.draw(BATCH * step).opens_window)
        assert flags[-1] == ([len(text.ends) for text in opened.texts] != looked_at)
    assert not flags[0] and 0 < sum(flags) <= 4
    later = Windows(whole, refuse_missing)
    assert later.draw(BATCH * (STEPS - 1)).opens_window, "what came before is looked at too"


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # sources are prepared window by window, by weight once each has one
        ((3, 1), ["s", "l", "s", "s", "l", "l"]),
        (({0: 0, 5: 1}, 1), ["s", "l", "s", "l", "s", "l"]),
        ((1, 8), ["s", "l", "l", "l", "s", "s"]),
    ],
)
def test_windows_of_sources_are_prepared_in_turns(
    tmp_path: Path, weights: tuple[Any, Any], expected: list[str]
) -> None:
    run = in_windows(tmp_path, weights)
    whole_before: list[int] = []

    def planned() -> None:
        plans = [shards.read_plan(folder) for folder in run_dir.prepared_sources(run)]
        whole_before.append(len(list(tmp_path.glob("prepared/*/train/*.json"))))
        assert all(plan is not None and plan.shard_counts for plan in plans)

    prepare(run, print, planned)
    assert whole_before == [0]
    open_prepared(run, verify=True)
    made = {
        shards.record_file(folder, "train", number).stat().st_mtime_ns: folder.name[0]
        for folder, count in zip(run_dir.prepared_sources(run), (9, 7), strict=True)
        for number in range(count)
    }
    order = "".join(made[moment] for moment in sorted(made))
    assert [turn[0] for turn in re.findall("s{1,3}|l{1,3}", order)] == expected


def test_tokens_are_those_of_a_preparation_one_by_one(whole: Run, tmp_path: Path) -> None:
    folders = whole.folders.model_copy(update={"prepared": tmp_path})
    data = whole.data.model_copy(update={"window_shards": None})
    other = whole.model_copy(update={"folders": folders, "data": data})
    prepare(other, print)
    for folder, same in zip(*map(run_dir.prepared_sources, (whole, other)), strict=True):
        assert folder.name == same.name
        assert shards.read_manifest(folder) == shards.read_manifest(same)


def test_a_source_of_another_tokenizer_is_refused(whole: Run, tmp_path: Path) -> None:
    folders = whole.folders.model_copy(update={"prepared": tmp_path / "prepared"})
    run = whole.model_copy(update={"folders": folders})
    shutil.copytree(whole.folders.prepared, folders.prepared)
    path = shards.tokenizer_folder(run_dir.prepared(run)) / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(UserError, match="the tokens are of"):
        Windows(run, refuse_missing)


def test_an_early_error_names_its_source(tmp_path: Path) -> None:
    run = in_windows(tmp_path)
    (tmp_path / "long.txt").write_text("")
    with pytest.raises(UserError, match="source long: "):
        prepare(run, print)
