"""Names ranks that are slow at their own work, and sums up at the end what each node needed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from atoll.health.judge import job_of, tell
from atoll.health.stragglers import STRETCHES, OwnWork, Place, Stragglers
from atoll.health.waiting import Clock, own_work_clock
from atoll.health.watchdog import node_name
from atoll.monitor.observers import Observer, Record, StepRecord, WatchedRun, Write
from atoll.sharding.process_group import gathered

MOST_NODES = 20  # in a record, the slowest first


class SlowRanks(Observer):
    """Ranks compare their own work every few steps: nothing is exchanged in between.

    The first stretch of a start is left out: it warms up, and one of its steps is profiled. A
    stretch that took too little time to tell anything makes the next one twice as long.
    """

    def __init__(self, watched: WatchedRun, write: Write, clock: Clock) -> None:
        run, world = watched.run, watched.world
        self.watched, self.write, self.clock = watched, write, clock
        self.every = ceil(run.watch.straggler_steps / STRETCHES)
        self.least_seconds = run.watch.straggler_seconds / STRETCHES
        device = "" if world.device.type == "cpu" else str(world.device)
        own = Place(node_name(), run.axes.stage(world.rank), device)
        self.stragglers = Stragglers(gathered(world, own), run.watch.straggler_ratio)
        self.step_of_last, self.began = watched.resumed_step, time.monotonic()
        self.is_warm = False
        self.stretches, self.last = 0, 0
        self.totals = [0.0 for _ in range(world.size)]

    def before_step(self, step: int) -> None:
        self.clock.step(True)

    def after_step(self, update: StepRecord) -> None:
        self.clock.step(False)
        if update.step - self.step_of_last < self.every:
            return
        taken = (self.clock.take(), time.monotonic() - self.began)
        works, seconds = zip(*gathered(self.watched.world, taken), strict=True)
        # by the first rank's clock, so that all decide the same
        is_long = self.is_warm and seconds[0] >= self.least_seconds
        if is_long and None not in works and self.watched.world.rank == 0:
            self.judge(update.step, works)
        if self.is_warm and not is_long:
            self.every *= 2
        self.step_of_last, self.began, self.is_warm = update.step, time.monotonic(), True

    def judge(self, step: int, works: Sequence[OwnWork]) -> None:
        """On the first rank."""
        folder, steps = self.watched.run_folder, STRETCHES * self.every
        for fault in self.stragglers.judge(step, steps, works):
            tell(folder, replace(fault, job=job_of(folder), time=round(time.time(), 3)))
        self.stretches += 1
        self.last = step
        self.totals = [a + work.seconds for a, work in zip(self.totals, works, strict=True)]

    def on_end(self) -> None:
        """What each node needed a step, in the mean of the steps that were compared."""
        if self.stretches:
            self.write({"event": "own_work", "step": self.last, "nodes": self.nodes()[:MOST_NODES]})

    def nodes(self) -> list[Record]:
        seconds: dict[str, dict[int, float]] = {}
        for rank, place in enumerate(self.stragglers.places):
            of_node = seconds.setdefault(place.node, {})
            of_node[rank] = round(self.totals[rank] / self.stretches, 6)
        rows = [
            {"node": node, "own_seconds": max(ranks.values()), "slowest": max(ranks, key=ranks.get)}  # type: ignore[arg-type]
            for node, ranks in seconds.items()
        ]
        return sorted(rows, key=lambda row: -row["own_seconds"])


@contextmanager
def slow_ranks(watched: WatchedRun, write: Write) -> Iterator[SlowRanks | None]:
    """The observer, with what tells waiting from work; None where there is nobody to compare with.

    All is torch's again when it closes.
    """
    if watched.world.size == 1 or not watched.run.watch.straggler_steps:
        yield None
        return
    with own_work_clock(watched.heartbeat, watched.wrapped, watched.world.device) as clock:
        yield SlowRanks(watched, write, clock)
