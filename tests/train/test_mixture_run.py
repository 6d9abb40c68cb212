"""Runs on several sources: their losses apart, the same on any ranks and across a resume."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import small_run
from rank_pool import RankPool
from test_train import stop_after

from atoll import run_dir
from atoll.__main__ import main
from atoll.data.samples import samples_of
from atoll.report.contents import of_runs
from atoll.report.run import read
from atoll.settings import Run
from atoll.train import checkpoint

WEIGHTS = ({0: 3, 3: 0.5}, 1)


def write_second_text(folder: Path) -> Path:
    source = random.Random(9)
    lines = (
        " ".join(source.choice(("north", "south", "gale")) for _ in range(source.randint(3, 30)))
        for _ in range(90)
    )
    path = folder / "second.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def mixed(folder: Path, ranks: int, **changes: Any) -> Run:
    """The small run on two texts."""
    files = (small_run.write_text(folder) if not (folder / "text.txt").exists() else
             folder / "text.txt", write_second_text(folder))  # fmt: skip
    names = ("islands", "winds")
    sources = [
        {"name": name, "files": str(file.resolve()), "weight": weight}
        for name, file, weight in zip(names, files, WEIGHTS, strict=True)
    ]
    return small_run.settings(
        folder, ranks, data__sources=sources, data__files=[], data__name="mixed", **changes
    )


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = mixed(tmp_path_factory.mktemp("whole"), 2, name="whole")
    folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    return folder


def test_each_source_has_its_held_out_loss_and_its_epochs(whole: Path) -> None:
    before, after = small_run.records(whole, "evaluation")
    for name in ("islands", "winds"):
        assert after[f"loss/{name}"] < before[f"loss/{name}"] - 0.1
    lowest, highest = sorted((after["loss/islands"], after["loss/winds"]))
    assert lowest < after["loss"] < highest
    epochs = [line["epochs/islands"] for line in small_run.records(whole, "train")]
    assert 0 < epochs[0] < epochs[-1]
    tables = of_runs([read(whole)]).tables
    rows = {row["source"]: row for row in tables["Sources"]}
    assert set(rows) == {"islands", "winds"} and rows["islands"]["weight"] == "3 from 0, 0.5 from 3"
    assert re.fullmatch(r"\d\.\d{4} → \d\.\d{4}", rows["winds"]["held-out loss"])


def evaluated(ranks: RankPool, run: Run) -> dict[str, Any]:
    """The held-out figures of a run that takes no step."""
    run = run.model_copy(update={"training": run.training.model_copy(update={"steps": 0})})
    folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    return small_run.records(folder, "evaluation")[-1]


def test_the_loss_of_a_source_is_that_of_its_text_alone(
    ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    run = mixed(tmp_path, 2, name="again")
    record = evaluated(ranks, run)
    counts = [int(samples_of(source, "validation").targets(slice(None)).sum())
              for source in run_dir.source_runs(run)]  # fmt: skip
    expected = (record["loss/islands"] * counts[0] + record["loss/winds"] * counts[1]) / sum(counts)
    assert record["loss"] == pytest.approx(expected, abs=1e-9)
    assert record["targets"] == sum(counts)
    for source, name in zip(run_dir.source_runs(run), ("islands", "winds"), strict=True):
        own = evaluated(ranks, source.model_copy(update={"name": name}))
        assert own["loss"] == pytest.approx(record[f"loss/{name}"], abs=1e-9)


@pytest.mark.parametrize("size", [1, 4])
def test_any_ranks_learn_the_same(ranks: RankPool, whole: Path, tmp_path: Path, size: int) -> None:
    run = mixed(tmp_path, size)
    folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=size)
    assert small_run.losses(folder) == pytest.approx(small_run.losses(whole), abs=1e-4)
    epochs = [
        {n: x for n, x in line.items() if n.startswith("epochs/")}
        for path in (folder, whole)
        for line in [small_run.records(path, "train")[-1]]
    ]
    assert epochs[0] == epochs[1]


def test_a_resumed_run_is_bit_exact(ranks: RankPool, whole: Path, tmp_path: Path) -> None:
    run = mixed(tmp_path, 2)
    folder = small_run.ready(run)
    ranks.run(stop_after, run, 3, world=2)
    assert checkpoint.latest(folder) == run_dir.checkpoint(folder, 3)
    ranks.run(small_run.train_here, run, world=2)
    assert small_run.losses(folder) == small_run.losses(whole)
    assert run_dir.result_file(folder).read_text() == run_dir.result_file(whole).read_text()


@pytest.mark.login_node
def test_the_export_states_every_source(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = run_dir.export(whole)
    assert main(["verify", str(export)]) == 0
    output = capsys.readouterr().out
    for place in ("prepared: ", "prepared.islands: 1 files", "prepared.winds: 1 files"):
        assert f"as stated    {place}" in output
    assert output.count("as stated    tokens: ") == 2
    card = (export / "README.md").read_text()
    assert "| islands: Weight | 3 from step 0, 0.5 from step 3 |" in card
    start = small_run.records(whole, "start")[0]
    assert re.fullmatch(r"islands [0-9a-f]{16}, winds [0-9a-f]{16}", start["made_of"]["sources"])
