"""Which ranks are slow at their own work, judged from what each spent on it in a stretch of steps.

A rank is compared with its peers, the ranks of its pipeline stage: other stages have other layers.
Alone in its stage it is compared with what it usually needs, and that with the other stages.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from atoll.health.faults import Blame, Fault

STRETCHES = 4  # in a row, each slow: a quarter each of the steps and seconds set
MOST_REMEMBERED = 64  # stretches, for what a rank usually needs


@dataclass(frozen=True)
class OwnWork:
    """Seconds of one rank on a step, in the mean of a stretch, without waiting for others."""

    compute: float  # and the optimizer's
    input: float  # waiting for its own batches

    @property
    def seconds(self) -> float:
        return self.compute + self.input


@dataclass(frozen=True)
class Place:
    """Where a rank is: its node, its stage, and whether it has a device for itself."""

    node: str
    stage: int
    device: str  # empty: it shares the processors of its node


@dataclass
class Stragglers:
    """Judges stretch after stretch; a rank is named once, and again only after it was well."""

    places: Sequence[Place]
    ratio: float
    usual: list[list[OwnWork]] = field(default_factory=list)
    slow_stretches: list[int] = field(default_factory=list)
    well_stretches: list[int] = field(default_factory=list)
    named: set[int] = field(default_factory=set)
    stages: list[list[int]] = field(default_factory=list)  # the ranks of each, which are peers

    def __post_init__(self) -> None:
        stages: dict[int, list[int]] = defaultdict(list)
        for rank, place in enumerate(self.places):
            stages[place.stage].append(rank)
        self.stages = list(stages.values())
        self.usual = [[] for _ in self.places]
        self.slow_stretches = [0 for _ in self.places]
        self.well_stretches = [0 for _ in self.places]

    def judge(self, step: int, steps: int, works: Sequence[OwnWork]) -> list[Fault]:
        """The faults that a stretch, which ends with `step`, makes known.

        `works`: of all ranks in order; `steps`: of all stretches that count.
        """
        expected = self.expected(works)
        for rank, (work, seconds) in enumerate(zip(works, expected, strict=True)):
            is_slow = work.seconds > self.ratio * seconds
            self.slow_stretches[rank] = self.slow_stretches[rank] + 1 if is_slow else 0
            self.well_stretches[rank] = 0 if is_slow else self.well_stretches[rank] + 1
            if not is_slow:
                self.usual[rank] = [*self.usual[rank], work][-MOST_REMEMBERED:]
        self.named -= {r for r in self.named if self.well_stretches[r] >= STRETCHES}
        slow = {r for r, count in enumerate(self.slow_stretches) if count >= STRETCHES}
        new, self.named = slow - self.named, self.named | slow
        faults = self.faults(step, new, works, expected)
        return [replace(f, evidence=f"{f.evidence}, over {steps} steps") for f in faults]

    def expected(self, works: Sequence[OwnWork]) -> list[float]:
        """What each rank would need if it were like its peers, or else as it usually is."""
        alone = [ranks[0] for ranks in self.stages if len(ranks) == 1]
        usual = {rank: median([work.seconds for work in self.usual[rank]]) for rank in alone}
        # how much more than usual
        relative = [works[rank].seconds / usual[rank] for rank in alone if usual[rank]]
        change = statistics.median_low(relative) if relative else 1.0
        expected = [0.0 for _ in works]
        for ranks in self.stages:
            peers = statistics.median_low([works[rank].seconds for rank in ranks])
            for rank in ranks:
                expected[rank] = peers
        for rank in alone:
            expected[rank] = usual[rank] * change or works[rank].seconds
        return expected

    def faults(
        self, step: int, new: set[int], works: Sequence[OwnWork], expected: Sequence[float]
    ) -> list[Fault]:
        """One of each node whose ranks are all slow, one of each other slow rank."""
        faults = []
        for node in sorted({self.places[rank].node for rank in new}):
            own = [rank for rank, place in enumerate(self.places) if place.node == node]
            fresh = sorted(new & {*own})
            worst = max(fresh, key=lambda rank: works[rank].seconds / expected[rank])
            if {*own} <= self.named and len(own) > 1:
                faults.append(self.fault(step, None, fresh, worst, works, expected))
                continue
            for rank in fresh:
                faults.append(self.fault(step, rank, [rank], rank, works, expected))
        return faults

    def fault(
        self,
        step: int,
        rank: int | None,
        ranks: list[int],
        worst: int,
        works: Sequence[OwnWork],
        expected: Sequence[float],
    ) -> Fault:
        place, own, peers = self.places[worst], works[worst].seconds, expected[worst]
        alone = sum(other.node == place.node for other in self.places) == 1
        by_input = self.waits_for_input(worst, works, peers)
        is_node = rank is None or ((alone or bool(place.device)) and not by_input)
        blame: Blame = "node" if is_node else "unknown"
        who = f"ranks {ranks[0]} to {ranks[-1]} need up to" if rank is None else "needs"
        evidence = (
            f"{who} {own:.3g} s a step for own work, {own / peers:.2f} times the "
            f"{peers:.3g} s of peers"
        )
        device = place.device if rank is not None else ""
        phase = "input" if by_input else "compute"
        return Fault("slow", blame, evidence, place.node, rank, device, step, phase)

    def waits_for_input(self, rank: int, works: Sequence[OwnWork], expected: float) -> bool:
        """Whether most of what a rank needs too much goes by until its batches are there."""
        others = [work.input for other, work in enumerate(works) if other != rank]
        too_much = works[rank].seconds - expected
        return works[rank].input - statistics.median_low(others) > too_much / 2


def median(values: Sequence[float]) -> float:
    """Of none: zero."""
    return statistics.median(values) if values else 0.0
