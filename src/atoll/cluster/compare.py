"""`atoll plan --facilities=A,B`: where the same tokens are trained soonest, and for how much."""

import json
import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll import run_dir
from atoll.cluster import before_queue, limits, slurm
from atoll.cluster.fit import check_fit
from atoll.cluster.goodput import job_starts
from atoll.config import certificate
from atoll.config.compose import compose, config_tree, known_shape, shardings
from atoll.errors import UserError
from atoll.plan.own_processors import as_computed_here
from atoll.plan.prediction import length, predict, steps_taken
from atoll.plan.search import best_layout
from atoll.settings import Run
from atoll.tables import table

MOST_JOBS = 20  # of a facility, the newest, whose time in the queue counts
COLUMNS = [
    *["facility", "nodes", "devices", "in queue", "by", "steps", "done after", "node-hours"],
    *["kWh", "GiB a device", "times", "strategy"],
]


@dataclass(frozen=True)
class Estimate:
    """The same tokens at one facility; None: not known."""

    facility: str
    nodes: int
    devices: int
    strategy: tuple[str, ...]
    queue_hours: float | None
    queue_from: str  # whose word that is
    hours: float | None  # of the steps
    node_hours: float | None
    device_kwh: float | None
    memory_gib: float | None
    times: str  # what they rest on
    why: str  # where something is not known

    @property
    def done_hours(self) -> float | None:
        """From now until its last step."""
        known = self.hours is not None and self.queue_hours is not None
        return (self.hours or 0.0) + (self.queue_hours or 0.0) if known else None

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Best first; behind them those without a queue, then those without a time."""
        known = self.done_hours
        least = (self.hours or 0.0) if known is None else known
        return self.hours is None, known is None, least


def compare(overrides: Sequence[str], names: str, as_json: bool) -> int:
    """Print a line for each facility, best first, and the line that submits there."""
    stated = [word for word in overrides if word.startswith("facility=")]
    facilities = [name for name in names.split(",") if name]
    if stated or len(facilities) < 2:
        raise UserError(
            f"--facilities {names} compares {len(facilities)} facilities"
            + (f", and {stated[0]} names another" if stated else ""),
            "name two or more, as --facilities NAME,OTHER, without facility=",
        )
    runs = [compose([*overrides, f"facility={name}"]).run for name in facilities]
    tokens = tokens_of(runs[0])
    rows = sorted((estimate(run, overrides, tokens) for run in runs), key=lambda each: each.order)
    if as_json:
        listed = [asdict(row) | {"done_hours": row.done_hours} for row in rows]
        print(json.dumps({"tokens": tokens, "facilities": listed}, indent=1))
        return 0
    print(f"{tokens:,} tokens; the soonest done first; ?: not known")
    print(table(COLUMNS, [_cells(row) for row in rows]))
    for row in rows:
        if row.why:
            print(f"{row.facility}: {row.why}")
    best = rows[0]
    if best.memory_gib is None:
        return 0
    words = [*overrides, f"facility={best.facility}", *best.strategy]
    print(f"sbatch/train.sbatch {shlex.join(words)}")
    return 0


def tokens_of(run: Run) -> int:
    """Of all its steps. Raises `UserError` where they follow from the text."""
    steps = steps_taken(run)
    if steps is not None and steps <= 0:
        raise UserError(
            f"training.steps={run.training.steps}, {run.checkpoint.initial_step} of them taken, "
            "leaves none to compare",
            "give steps: training.steps=1000",
        )
    if steps is None:
        raise UserError(
            "training.epochs says when training ends: its tokens follow from the text",
            "give steps: training.steps=1000 training.epochs=null",
        )
    return steps * run.training.global_batch_samples * run.data.sequence_tokens


def estimate(run: Run, overrides: Sequence[str], tokens: int) -> Estimate:
    """What so many tokens take at the run's facility, or why they cannot be trained there."""
    name = run.facility.name
    try:
        limits.check_supported(run)
        limits.check_nodes(run)
        run, strategy = _with_its_strategy(run, overrides)
        check_fit(run)
    except UserError as error:
        nothing = (None, "", None, None, None, None, "")
        return Estimate(name, run.job_nodes, run.world_size, (), *nothing, why=error.found)
    rates, calibration = certificate.rates(run), certificate.calibration(run)
    write_gb_s = certificate.file_write_gb_s(run)
    plan = predict(as_computed_here(run), known_shape(run), rates, calibration, write_gb_s)
    same = tokens / tokens_of(run)
    queue, whose = queue_hours(run)
    times = f"{plan.runs} runs there" if plan.runs else plan.rates.source
    return Estimate(
        facility=name,
        nodes=run.job_nodes,
        devices=run.world_size,
        strategy=strategy,
        queue_hours=queue,
        queue_from=whose,
        hours=None if plan.hours is None else plan.hours * same,
        node_hours=None if plan.node_hours is None else plan.node_hours * same,
        device_kwh=None if plan.device_kwh is None else plan.device_kwh * same,
        memory_gib=plan.memory_gib,
        times="" if plan.hours is None else f"{'least, ' if plan.is_bound else ''}{times}",
        why=plan.why_no_time,
    )


def _with_its_strategy(run: Run, overrides: Sequence[str]) -> tuple[Run, tuple[str, ...]]:
    """The one that takes least time there; a stated one stays."""
    if any(word.startswith("sharding") for word in overrides):
        return run, ()
    tree, rates = shardings(config_tree()), certificate.rates(run)
    best = best_layout(run, known_shape(run), tree, rates, overrides)
    words = [*overrides, f"facility={run.facility.name}", *best.overrides]
    return compose(words).run, best.overrides


def queue_hours(run: Run) -> tuple[float | None, str]:
    """Until it would start: by the scheduler here, else the median of this clone's own jobs."""
    if run.facility.scheduler == "none":
        return 0.0, "no scheduler"
    if (seconds := expected_wait_seconds(run)) is not None:
        return seconds / 3600, "--test-only"
    waits = past_waits_seconds(run)
    if not waits:
        return None, ""
    return statistics.median(waits) / 3600, f"{len(waits)} jobs"


def expected_wait_seconds(run: Run) -> float | None:
    """Until Slurm would start such a job, were all running ones to last their whole limits."""
    if run.facility.scheduler != "slurm":
        return None
    argv = slurm.sbatch_argv(run, Path("train.sbatch"), run_dir.folder(run))
    begin = before_queue.expected_start([*argv[:-2], "--wrap=true"], os.environ)
    return None if begin is None else before_queue.seconds_until(begin)


def past_waits_seconds(run: Run) -> list[float]:
    """How long this clone's newest jobs waited at a facility: from kept accounting, or sacct."""
    waits: list[float] = []
    files = run.folders.runs.glob("*/jobs.txt")
    for file in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
        if len(waits) >= MOST_JOBS:
            break
        if _facility_of(file.parent) == run.facility.name:
            waits += _waits(file.parent)
    return waits[:MOST_JOBS]


def _facility_of(folder: Path) -> str | None:
    try:
        prediction = json.loads(run_dir.prediction_file(folder).read_text())
    except (OSError, ValueError):
        return None
    return str(prediction.get("facility"))


def _waits(folder: Path) -> list[float]:
    """Of each start of its jobs; a requeued one waited once."""
    file = run_dir.accounting_file(folder)
    if not file.is_file():
        return [start.started - start.submitted for start in job_starts(folder)]
    jobs = json.loads(file.read_text())["jobs"]
    known = [(job["submitted"], job["started"]) for job in jobs]
    return [started - submitted for submitted, started in known if submitted and started]


def _cells(row: Estimate) -> list[str]:
    def shown(value: float | None, text: str = "{:,.3g}") -> str:
        return "?" if value is None else text.format(value)

    def lasting(hours: float | None) -> str:
        return "?" if hours is None else length(hours)

    return [
        row.facility,
        f"{row.nodes}",
        f"{row.devices}",
        lasting(row.queue_hours),
        row.queue_from or "?",
        lasting(row.hours),
        lasting(row.done_hours),
        shown(row.node_hours),
        shown(row.device_kwh),
        shown(row.memory_gib),
        row.times or "?",
        " ".join(row.strategy) or "as stated",
    ]
