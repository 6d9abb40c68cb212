"""Stopping in time: ranks agree on a step, save, and go on with the same losses."""

import errno
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import small_run
from rank_pool import RankPool

from atoll import run_dir
from atoll.errors import UserError
from atoll.monitor.observers import Observer, StepRecord
from atoll.sharding.agreement import Background
from atoll.sharding.process_group import World
from atoll.train import stop_signals
from atoll.train import train as trainer
from atoll.train.train import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


def stopped_at(world: World, run, rank: int, step: int) -> int:
    """Train; a signal reaches one rank at one step."""
    calls = iter(range(100))

    def stop_code() -> int:
        return stop_signals.TIME_IS_OVER if world.rank == rank and next(calls) >= step else 0

    return train(run, run_dir.folder(run), world, stop_code)


def calls_under_way(world: World, run) -> list[str]:
    """What the ranks still exchange when a step is handed to the observers."""
    pending, under_way = [], []

    def start(background: Background, call: Any) -> Any:
        pending.append(original(background, call))
        return pending[-1]

    class Watcher(Observer):
        def after_step(self, update: StepRecord) -> None:
            time.sleep(0.01 * world.rank)  # the other rank would be ahead, and wait for this one
            under_way.extend(str(update.step) for call in pending if not call.done())

    original, Background.start = Background.start, start
    built, trainer.watching = trainer.watching, lambda _: nullcontext((Watcher(),))
    try:
        train(run, run_dir.folder(run), world, lambda: 0)
    finally:
        Background.start, trainer.watching = original, built
    assert len(pending) >= 6
    return under_way


def test_nothing_is_under_way_between_two_steps(ranks: RankPool, folder: Path) -> None:
    """A profiler that an observer stops there must not meet a thread that still records."""
    run = small_run.settings(folder, 2, name="quiet")
    small_run.ready(run)
    assert ranks.run(calls_under_way, run, world=2) == [[], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_run_goes_on_with_the_same_losses(ranks: RankPool, folder: Path, rank) -> None:
    whole = small_run.settings(folder, 2, name="whole", checkpoint__every_steps=0)
    small_run.ready(whole)
    ranks.run(small_run.train_here, whole, world=2)
    run = small_run.settings(folder, 2, name="stopped", checkpoint__every_steps=0)
    run_folder = small_run.ready(run)
    codes = ranks.run(stopped_at, run, rank, 1, world=2)
    assert codes == [run_dir.RESTART_CODE] * 2
    assert run_dir.restart_file(run_folder).exists()
    [entry] = map(json.loads, run_dir.restarts_file(run_folder).read_text().splitlines())
    assert 0 < entry["step"] < 6
    assert max(small_run.losses(run_folder)) == entry["step"]
    ranks.run(small_run.train_here, run, world=2)
    assert small_run.losses(run_folder) == small_run.losses(run_dir.folder(whole))


def test_an_evaluation_that_is_due_at_the_end_of_a_job_is_the_next_one_s(
    ranks: RankPool, folder: Path
) -> None:
    """It may take longer than what is left of the job."""
    cadence = {"checkpoint__every_steps": 0, "evaluation__every_steps": 2}
    whole = small_run.settings(folder, 2, name="whole", **cadence)
    small_run.ready(whole)
    ranks.run(small_run.train_here, whole, world=2)
    run = small_run.settings(folder, 2, name="stopped", **cadence)
    run_folder = small_run.ready(run)
    assert ranks.run(stopped_at, run, 1, 1, world=2) == [run_dir.RESTART_CODE] * 2
    assert max(small_run.losses(run_folder)) == 2
    assert [e["step"] for e in small_run.records(run_folder, "evaluation")] == [0]
    ranks.run(small_run.train_here, run, world=2)
    assert evaluations(run_folder) == evaluations(run_dir.folder(whole))


def evaluations(run_folder: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in small_run.records(run_folder, "evaluation")]


@pytest.mark.parametrize(("asked", "has_result"), [(5, False), (6, True)])
def test_a_stop_behind_the_last_step_leaves_the_end_to_the_next_start(
    ranks: RankPool, folder: Path, asked: int, has_result: bool
) -> None:
    whole = small_run.settings(folder, 2, name="whole")
    small_run.ready(whole)
    ranks.run(small_run.train_here, whole, world=2)
    run = small_run.settings(folder, 2, name="stopped")
    run_folder = small_run.ready(run)
    assert ranks.run(stopped_at, run, 0, asked, world=2) == [run_dir.RESTART_CODE] * 2
    assert run_dir.restart_file(run_folder).exists()
    assert run_dir.result_file(run_folder).exists() == has_result
    assert not run_dir.export(run_folder).exists()
    ranks.run(small_run.train_here, run, world=2)
    assert files_of_the_end(run_folder) == files_of_the_end(run_dir.folder(whole))


def files_of_the_end(run_folder: Path) -> dict[str, bytes]:
    weights = [*run_dir.export(run_folder).glob("*.safetensors")]
    assert weights
    return {path.name: path.read_bytes() for path in [run_dir.result_file(run_folder), *weights]}


def test_a_run_is_not_restarted_for_ever(folder: Path) -> None:
    run = small_run.settings(folder, 2)
    run_folder = run_dir.folder(run)
    run_folder.mkdir(parents=True)
    for step in range(run.restart.max_restarts):
        stop_signals.note_restart(run, run_folder, step + 1)
    run_dir.restart_file(run_folder).unlink()
    with pytest.raises(UserError, match=f"after {run.restart.max_restarts} restarts"):
        stop_signals.note_restart(run, run_folder, 99)
    assert not run_dir.restart_file(run_folder).exists()


def test_a_job_stopped_at_once_takes_a_step_before_it_is_queued_again(
    ranks: RankPool, folder: Path
) -> None:
    """So that restarts end, however short the jobs are."""
    run = small_run.settings(folder, 1, sharding=small_run.sharding("single"))
    run_folder = small_run.ready(run)
    for step in (1, 2):
        assert ranks.run(stopped_at, run, 0, 0, world=1) == [run_dir.RESTART_CODE]
        entries = run_dir.restarts_file(run_folder).read_text().splitlines()
        assert [json.loads(entry)["step"] for entry in entries] == list(range(1, step + 1))


def test_signals_and_the_file_are_caught_then_left_as_they_were(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals.stop_signals(tmp_path, rank=0) as stop_code:
        assert stop_code() == 0
        run_dir.stop_file(tmp_path).touch()
        assert stop_code() == stop_signals.TIME_IS_OVER
    with stop_signals.stop_signals(tmp_path, rank=1) as stop_code:
        assert stop_code() == 0  # the first rank alone looks for the file
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_code() == stop_signals.TERMINATED
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_system_that_does_not_answer_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with stop_signals.stop_signals(tmp_path, rank=0) as stop_code:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", exists)
            assert stop_code() == 0
        run_dir.stop_file(tmp_path).touch()
        assert stop_code() == stop_signals.TIME_IS_OVER


def test_ctrl_c_saves_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    with stop_signals.stop_signals(tmp_path, rank=1) as stop_code:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_code() == stop_signals.INTERRUPTED == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
