"""A rank's record: what it is at, as another process reads it."""

import itertools
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from atoll.health import heartbeat


def test_another_process_reads_what_a_rank_is_at(tmp_path: Path) -> None:
    own = heartbeat.begin(tmp_path / "node", 3)
    own.step(7)
    with own.at("checkpoint"):
        record = read(tmp_path / "node", 3)
        assert (record.rank, record.step, record.phase) == (3, 7, "checkpoint")
    own.at("input")
    own.at("compute")
    record = read(tmp_path / "node", 3)
    assert record.phase == "compute" and record.pid == os.getpid()
    assert record.start_ticks == heartbeat.started_ticks(os.getpid()) > 0
    assert (record.exit_code, record.error) == (heartbeat.ALIVE, "")
    assert abs(record.moved - time.monotonic()) < 5


def test_the_phase_before_goes_on_behind_a_with(tmp_path: Path) -> None:
    own = heartbeat.begin(tmp_path, 0)
    own.at("compute")
    with own.at("checkpoint"), own.at("communication"):
        pass
    assert read(tmp_path, 0).phase == "compute"


def test_the_seconds_of_phases_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    own = heartbeat.begin(tmp_path, 0)
    for phase, seconds in (("input", 2.0), ("compute", 8.0), ("input", 1.0)):
        own.at(phase)
        now += seconds
    assert own.seconds["input"] == pytest.approx(3) and own.seconds["compute"] == pytest.approx(8)
    assert sum(own.seconds.values()) == pytest.approx(11)
    assert read(tmp_path, 0).seconds == {**own.seconds}


def test_steps_are_counted_and_timed(tmp_path: Path) -> None:
    own = heartbeat.begin(tmp_path, 0)
    own.step(10)
    assert read(tmp_path, 0).step_seconds == 0
    time.sleep(0.01)
    own.step(11)
    record = read(tmp_path, 0)
    assert (record.step, record.steps) == (11, 2) and 0.01 <= record.step_seconds < 1


def test_an_end_and_an_error_are_read(tmp_path: Path) -> None:
    heartbeat.begin(tmp_path, 0).ended(200)
    heartbeat.begin(tmp_path, 1).failed("ValueError: é" + "x" * 10_000)
    assert read(tmp_path, 0).exit_code == 200
    assert read(tmp_path, 1).error.startswith("ValueError: éx")


def test_a_new_start_of_a_rank_forgets_the_old_one(tmp_path: Path) -> None:
    heartbeat.begin(tmp_path, 0).failed("an error")
    heartbeat.begin(tmp_path, 0)
    assert read(tmp_path, 0).error == ""
    assert heartbeat.read_all(tmp_path, range(2)).keys() == {0}


def test_what_a_killed_start_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Unless its watcher is there, or may still be starting: another run's faults are its own."""
    names = ("alive", "dead", "just-dead", "watched", "new")
    alive, dead, just_dead, watched, new = (tmp_path / f"atoll-{os.getuid()}-{n}" for n in names)
    heartbeat.begin(alive, 0)
    for folder in (dead, just_dead, watched):
        context = multiprocessing.get_context("fork")
        process = context.Process(target=heartbeat.begin, args=(folder, 0))
        process.start()
        process.join()
    own = f"{os.getpid()} {heartbeat.started_ticks(os.getpid())}"
    heartbeat.watcher_file(watched).write_text(own)
    long_ago = time.time() - 120
    for folder in (alive, dead, watched):
        os.utime(folder, (long_ago, long_ago))
    new.mkdir()
    heartbeat.forget_dead_starts(new)
    assert sorted(tmp_path.iterdir()) == sorted([alive, just_dead, new, watched])


def test_each_start_of_each_run_has_its_folder(tmp_path: Path) -> None:
    names = itertools.product("ab", ("1-29500", "2-29500"), (0, 1))
    folders = {heartbeat.node_folder(tmp_path / run, start, node) for run, start, node in names}
    assert len(folders) == 8


def test_a_move_is_cheap() -> None:
    own = heartbeat.unwatched(0)
    best = min(seconds_of_moves(own) for _ in range(5))
    assert best < 5e-6


def seconds_of_moves(own: heartbeat.Heartbeat, moves: int = 2000) -> float:
    began = time.process_time()
    for _ in range(moves):
        with own.at("compute"):
            pass
    return (time.process_time() - began) / moves


def read(folder: Path, rank: int) -> heartbeat.Record:
    record = heartbeat.read(heartbeat.record_file(folder, rank))
    assert record is not None
    return record
