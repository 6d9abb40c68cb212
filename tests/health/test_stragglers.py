"""Who is slow at its own work: by made-up figures, and by ranks that wait for one another."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
from rank_pool import RankPool

from atoll.health import heartbeat
from atoll.health.faults import Fault, faults
from atoll.health.stragglers import STRETCHES, OwnWork, Place, Stragglers, median
from atoll.health.waiting import DeviceClock, own_work_clock
from atoll.monitor import slow_ranks
from atoll.report.run import read, run_tables
from atoll.sharding.process_group import World
from atoll.train import loop

FOUR = [Place(node, 0, "") for node in ("n1", "n1", "n2", "n2")]


def judged(places: list[Place], *stretches: tuple[float, ...]) -> list[Fault]:
    """What becomes known over stretches of so many seconds a step, of each rank."""
    stragglers = Stragglers(places, 1.3)
    known = []
    for number, seconds in enumerate(stretches, 1):
        works = [OwnWork(each, 0.0) for each in seconds]
        known += stragglers.judge(5 * number, 20, works)
    return known


def test_a_slow_rank_is_named_once_and_again_after_it_was_well():
    slow, well = (1.0, 1.1, 1.9, 0.9), (1.0, 1.1, 1.0, 0.9)
    [fault] = judged(FOUR, *[slow] * 9)
    assert (fault.kind, fault.rank, fault.node, fault.step) == ("slow", 2, "n2", 20)
    assert fault.blame == "unknown", "its node's other rank is well"
    assert fault.evidence == (
        "needs 1.9 s a step for own work, 1.90 times the 1 s of peers, over 20 steps"
    )
    assert len(judged(FOUR, *[slow] * 5, well, *[slow] * 4)) == 1
    assert len(judged(FOUR, *[slow] * 5, *[well] * 4, *[slow] * 4)) == 2


def test_a_rank_that_is_slow_now_and_then_is_not_named():
    assert judged(FOUR, *[(1.0, 1.0, 9.0, 1.0)] * 3, (1.0, 1.0, 1.2, 1.0)) == []
    turns = [(1.0, 1.0, 2.0, 1.0), (2.0, 1.0, 1.0, 1.0)] * 10
    assert judged(FOUR, *turns) == []


def test_a_node_is_blamed_when_all_of_its_ranks_are_slow():
    places = [Place(node, 0, "") for node in ("n1", "n1", "n2", "n2", "n3", "n3")]
    [fault] = judged(places, *[(1.0, 1.0, 2.1, 2.0, 1.0, 1.1)] * 4)
    assert (fault.node, fault.rank, fault.blame) == ("n2", None, "node")
    assert fault.evidence.startswith("ranks 2 to 3 need up to 2.1 s a step for own work")


@pytest.mark.parametrize(("device", "blame"), [("cuda:1", "node"), ("", "unknown")])
def test_a_device_is_its_node_s(device: str, blame: str):
    places = [Place("n1", 0, device) for _ in range(4)]
    [fault] = judged(places, *[(1.0, 2.0, 1.0, 1.0)] * 4)
    assert (fault.rank, fault.blame, fault.device) == (1, blame, device)


def test_stages_are_compared_with_themselves():
    """One has twice the layers; alone in its stage, a rank is compared with what is usual."""
    pairs = [Place(f"n{n}", n // 2, "") for n in range(4)]
    assert judged(pairs, *[(1.0, 1.0, 2.0, 2.0)] * 8) == []
    [fault] = judged(pairs, *[(1.0, 1.0, 2.0, 3.0)] * 8)
    assert (fault.rank, fault.node, fault.blame) == (3, "n3", "node")
    alone = [Place(f"n{n}", n, "") for n in range(3)]
    usual, slow, longer = (1.0, 2.0, 3.0), (1.0, 4.0, 3.0), (2.0, 4.0, 6.0)
    assert judged(alone, *[usual] * 4, *[longer] * 8) == [], "all have more to do"
    [fault] = judged(alone, *[usual] * 4, *[slow] * 8)
    assert (fault.rank, fault.step) == (1, 40)


def test_a_rank_that_waits_for_its_batches_does_not_speak_against_its_node():
    places = [Place(f"n{n}", 0, "cuda:0") for n in range(3)]
    stragglers = Stragglers(places, 1.3)
    works = [OwnWork(1.0, 0.0), OwnWork(1.0, 1.0), OwnWork(1.0, 0.0)]
    [fault] = [f for n in range(STRETCHES) for f in stragglers.judge(n, 20, works)]
    assert (fault.rank, fault.phase, fault.blame) == (1, "input", "unknown")


PAUSE_SECONDS = 0.3  # much beside what a crowded machine takes from a step
STEPS = 7


def slow_training(world: World, run: Any, slow_rank: int, where: str) -> list[list[OwnWork]]:
    """Train while one rank pauses in each step; what the first rank was told, in order."""
    told: list[list[OwnWork]] = []
    judge, compute, batches = (
        slow_ranks.SlowRanks.judge, loop.accumulate_gradients, loop.remaining_batches
    )  # fmt: skip

    def seen(self: Any, step: int, works: list[OwnWork]) -> None:
        told.append(works)
        judge(self, step, works)

    def slow_compute(state: Any, share: Any, step: int) -> Any:
        time.sleep(PAUSE_SECONDS)
        return compute(state, share, step)

    @contextmanager
    def slow_batches(*args: Any) -> Iterator[Iterator[Any]]:
        with batches(*args) as shares:
            yield (time.sleep(PAUSE_SECONDS) or share for share in shares)

    slow_ranks.SlowRanks.judge = seen  # type: ignore[method-assign]
    if world.rank == slow_rank and where == "compute":
        loop.accumulate_gradients = slow_compute
    elif world.rank == slow_rank:
        loop.remaining_batches = slow_batches
    wait = torch.distributed.Work.wait
    try:
        small_run.train_here(world, run)
    finally:
        slow_ranks.SlowRanks.judge = judge  # type: ignore[method-assign]
        loop.accumulate_gradients, loop.remaining_batches = compute, batches
    assert torch.distributed.Work.wait is wait, "torch is as it was"
    return told


@pytest.mark.parametrize(
    ("strategy", "sizes", "where"),
    [
        ("ddp", {}, "compute"),
        ("ddp", {}, "input"),
        ("full_shard", {}, "compute"),
        ("pipeline", {"pipeline": 2}, "compute"),
        ("tensor", {"tensor": 2}, "compute"),
    ],
)
def test_waiting_is_told_from_work(
    ranks: RankPool, tmp_path: Path, strategy: str, sizes: dict[str, int], where: str
):
    """Two ranks that wait for one another take the same time; one alone works so long."""
    small_run.write_text(tmp_path)
    run = small_run.settings(
        tmp_path,
        2,
        sharding=small_run.sharding(strategy) | sizes,
        training__steps=STEPS,
        checkpoint__every_steps=0,
        watch={"straggler_steps": 4, "straggler_seconds": 0.0},
        monitor={"communication": False, "energy": False, "progress": False},
    )
    folder = small_run.ready(run)
    told = ranks.run(slow_training, run, 1, where, world=2)[0]
    assert len(told) == STEPS - 1
    quick, slow = (median([works[rank].seconds for works in told]) for rank in range(2))
    assert slow - quick > PAUSE_SECONDS / 3, "what one works the other waits"
    [summary] = small_run.records(folder, "own_work")
    assert summary["nodes"][0]["slowest"] == 1
    tables = run_tables([read(folder)])
    assert tables["Own work of nodes"][0]["of rank"] == "1"
    if strategy == "ddp":  # alone in its stage, a rank is slow where it was not so before
        [fault] = faults(folder)
        assert (fault.kind, fault.rank, fault.phase) == ("slow", 1, where)
        assert tables["Faults"][0]["what"] == "slow"


class FakeCuda:
    """A device whose clock goes on by what it is told, in its own stream."""

    def __init__(self) -> None:
        self.now, self.stream = 0.0, "computes"

    def current_stream(self) -> str:
        return self.stream

    def Event(self, enable_timing: bool) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.time, self.is_over = cuda, 0.0, True

    def record(self) -> None:
        self.time = self.cuda.now

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1e3 * (other.time - self.time)


def test_a_device_is_timed_by_its_own_events():
    cuda = FakeCuda()
    clock = DeviceClock(heartbeat.unwatched(0), cuda)

    def go(seconds: float) -> None:
        cuda.now += seconds

    for _ in range(2):
        clock.step(True)
        go(1.0)
        clock.waits(True)
        go(5.0)
        clock.waits(False)
        go(0.5)
        cuda.stream = "gathers"  # of FSDP's own: nothing waits for what it waits for
        clock.waits(True)
        go(0.25)
        clock.waits(False)
        cuda.stream = "computes"
        clock.step(False)
        go(7.0)  # a checkpoint
    work = clock.take()
    assert work is not None and work.seconds == pytest.approx(1.75, abs=1e-3)
    clock.step(True)
    clock.step(False)
    clock.marks[-1][1].is_over = False
    assert clock.take() is None, "the device has not come so far"


def test_a_checkpoint_s_wait_stays_the_checkpoint_s():
    own = heartbeat.unwatched(0)
    with own_work_clock(own, torch.nn.Linear(1, 1), torch.device("cpu")) as clock:
        own.at("checkpoint")
        clock.waits(True)
        assert own.phase == "checkpoint"
        own.at("compute")
        clock.waits(True)
        assert own.phase == "communication"
        clock.waits(False)
        assert own.phase == "compute"
