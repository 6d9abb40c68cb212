"""Runs that begin with the first shards: the same on any ranks, and stopped while they wait."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import small_run
from rank_pool import RankPool

from atoll import run_dir
from atoll.data import shards
from atoll.settings import Run
from atoll.sharding.process_group import World
from atoll.train import checkpoint
from atoll.train.train import train

STEPS = 18


def windowed(folder: Path, ranks: int, sources: bool = False, **changes: Any) -> Run:
    """The small run in windows of four shards, of twelve; or on two texts, the second of six."""
    if not (folder / "text.txt").exists():
        small_run.write_text(folder)
    if sources:
        changes["data__files"] = []
        (folder / "half.txt").write_text("".join(lines_of(folder / "text.txt")[::2]))
        changes["data__sources"] = [
            {"name": "all", "files": str(folder / "text.txt"), "weight": 2},
            {"name": "half", "files": str(folder / "half.txt"), "weight": {0: 1, 9: 3}},
        ]
    changes = {"training__log_every_steps": 5, "checkpoint__every_steps": 0} | changes
    return small_run.settings(
        folder,
        ranks,
        training__steps=STEPS,
        data__documents_per_shard=20,
        data__window_shards=4,
        folders__prepared=str(folder / "prepared"),
        **changes,
    )


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in small_run.records(folder, "train")}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "sources"])
def sources(request: pytest.FixtureRequest) -> bool:
    """Whether the runs read two texts."""
    return bool(request.param)


@pytest.fixture(scope="module")
def whole(ranks: RankPool, sources: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = windowed(tmp_path_factory.mktemp("whole"), 2, sources)
    folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    return folder


def test_losses_are_those_of_one_rank(
    ranks: RankPool, sources: bool, whole: Path, tmp_path: Path
) -> None:
    run = windowed(tmp_path, 1, sources, sharding=small_run.sharding("single"))
    folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    assert losses(folder) == pytest.approx(losses(whole), abs=1e-5)


def stopped_code(world: World, run: Run) -> None:
    code = train(run, run_dir.folder(run), world, lambda: 0)
    assert code == run_dir.RESTART_CODE, code


def test_a_job_whose_time_ends_while_ranks_wait_saves_and_goes_on(
    ranks: RankPool, sources: bool, whole: Path, tmp_path: Path
) -> None:
    run = windowed(tmp_path, 2, sources)
    folder, prepared = small_run.ready(run), run_dir.prepared_sources(run)[0]
    kept = tmp_path / "kept"
    shutil.copytree(prepared, kept)
    shards.manifest_file(prepared).unlink()
    shards.record_file(prepared, "train", 5).unlink()
    run_dir.write_whole(run_dir.preparing_file(folder), "running\n")
    run_dir.write_whole(run_dir.stop_file(folder), "")
    ranks.run(stopped_code, run, world=2)
    newest = checkpoint.latest(folder)
    assert newest is not None
    stopped = int(newest.name.split("-")[1])
    assert 0 < stopped < STEPS and stopped in losses(folder)
    assert run_dir.restart_file(folder).exists()
    shutil.copytree(kept, prepared, dirs_exist_ok=True)
    run_dir.stop_file(folder).unlink()
    ranks.run(small_run.train_here, run, world=2)
    every = losses(folder)
    assert {step: every[step] for step in (5, STEPS)} == {
        step: losses(whole)[step] for step in (5, STEPS)
    }


def test_a_first_window_that_does_not_come_in_time_is_two_lines(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = windowed(tmp_path, 1, sharding=small_run.sharding("single"))
    folder = small_run.ready(run)
    shards.manifest_file(run_dir.prepared(run)).unlink()
    shards.record_file(run_dir.prepared(run), "train", 1).unlink()
    run_dir.write_whole(run_dir.preparing_file(folder), "running\n")
    run_dir.write_whole(run_dir.stop_file(folder), "")
    with pytest.raises(Exception, match=r"time of the job is nearly over, and shard 2 of 12"):
        ranks.run(small_run.train_here, run, world=1)
