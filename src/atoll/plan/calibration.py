"""What a facility's finished runs teach its next ones: few factors, each a median of runs.

Of a step there is one for each strategy family and size of a step, since a tiny model's runs say
nothing of a large one's; sizes are quarters of a power of ten. Where the plan is no bound, it
counts as one run beside those of another size. Of memory there is one for each family and planned
peak: a job that ran here before is known by its plan, others take the median of their family's; the
plan itself counts as one run, since peaks of one job differ by a tenth on processors. A factor
stays within bounds, whatever runs measured.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.settings import Run

STEP_BOUNDS = (0.25, 20.0)  # a peak is never beaten fourfold; small kernels stay far below it
MEMORY_BOUNDS = (0.5, 4.0)
SIZES = 4  # of steps, in a power of ten
MOST_APART = SIZES  # sizes between a step and the runs that teach it
SAME_PLAN = 1e-4  # of memory: peaks this near are of one job, typed again
MOST_RUNS = 20  # of a facility, the newest
Calibration = Mapping[str, Any]  # `calibration` of a certificate


class Sample(NamedTuple):
    """A finished run beside its plan before any factor; None: not known."""

    family: str
    planned_seconds: float | None
    measured_seconds: float
    planned_gib: float | None
    measured_gib: float
    start_seconds: float | None  # from its job's begin to its first step
    end_seconds: float | None = None  # from its export to its last job's end


class Factor(NamedTuple):
    """Measured over planned, and the runs that it rests on."""

    value: float
    runs: int


def strategy_family(run: Run) -> str:
    """Layouts and the axes that divide a sample: strategies that err alike."""
    axes = run.axes
    divided = {
        "tensor": axes.tensor,
        "context": axes.context,
        "expert": axes.expert,
        "pipeline": axes.pipeline,
    }
    if run.world_size == 1:
        return "one rank"
    layouts = [name for name in run.sharding.layouts if name not in divided]
    spread = layouts or [run.sharding.exchange or run.sharding.engine]
    return " + ".join([*spread, *(name for name, size in divided.items() if size > 1)])


def size_of(seconds: float) -> int:
    """Of a step as planned: 0 from 1 s on, 1 from 1.8 s, 4 from 10 s."""
    return math.floor(SIZES * math.log10(seconds))


def calibration_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The factors of a certificate, from a facility's newest finished runs."""
    steps: dict[tuple[str, int], list[float]] = {}
    memory: dict[tuple[str, float], list[float]] = {}
    for sample in samples:
        if sample.planned_seconds:
            key = (sample.family, size_of(sample.planned_seconds))
            steps.setdefault(key, []).append(sample.measured_seconds / sample.planned_seconds)
        if sample.planned_gib:
            peak = (sample.family, float(f"{sample.planned_gib:.6g}"))
            memory.setdefault(peak, []).append(sample.measured_gib / sample.planned_gib)
    starts = [sample.start_seconds for sample in samples if sample.start_seconds is not None]
    ends = [sample.end_seconds for sample in samples if sample.end_seconds is not None]
    return {
        "step": [
            {"family": family, "size": size} | _median(ratios, STEP_BOUNDS)
            for (family, size), ratios in sorted(steps.items())
        ],
        "memory": [
            {"family": family, "planned_gib": peak} | _median(ratios, MEMORY_BOUNDS)
            for (family, peak), ratios in sorted(memory.items())
        ],
        "start_seconds": statistics.median(starts) if starts else None,
        "start_runs": len(starts),
        "end_seconds": statistics.median(ends) if ends else None,
    }


def step_factor(
    calibration: Calibration | None, family: str, seconds: float, plan_counts: bool = False
) -> Factor | None:
    """Of the nearest size, of two as near the one that more runs took; None: none is near.

    plan_counts: as one run beside those of another size, where it is no bound.
    """

    def apart(row: Mapping[str, Any]) -> tuple[int, int]:
        return abs(int(row["size"]) - size_of(seconds)), -int(row["runs"])

    own = [row for row in _rows(calibration, "step") if row["family"] == family]
    row = min(own, key=apart, default=None)
    if row is None or apart(row)[0] > MOST_APART:
        return None
    factor, runs = row["factor"], row["runs"]
    if plan_counts and apart(row)[0]:
        factor = _beside_plan(factor, runs)
    return Factor(factor, runs)


def memory_factor(calibration: Calibration | None, family: str, gib: float) -> Factor | None:
    """Of runs with this planned peak, else the median of the family's; None: there are none."""
    own = [row for row in _rows(calibration, "memory") if row["family"] == family]
    # a certificate of an earlier version has no peaks
    same = [row for row in own if abs(row.get("planned_gib", 0.0) / gib - 1) <= SAME_PLAN]
    chosen = same or own
    if not chosen:
        return None
    runs = sum(row["runs"] for row in chosen)
    median = statistics.median(row["factor"] for row in chosen)
    return Factor(_beside_plan(median, runs), runs)


def _beside_plan(factor: float, runs: int) -> float:
    """The mean of these runs and of the plan as one more."""
    return (1.0 + runs * factor) / (1 + runs)


def _rows(calibration: Calibration | None, name: str) -> Iterable[Mapping[str, Any]]:
    rows: Iterable[Mapping[str, Any]] = (calibration or {}).get(name, [])
    return rows


def _median(ratios: Sequence[float], bounds: tuple[float, float]) -> dict[str, Any]:
    least, most = bounds
    factor = min(most, max(least, statistics.median(ratios)))
    return {"factor": round(factor, 4), "runs": len(ratios)}
