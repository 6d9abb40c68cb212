"""What runs wrote down, and the tables of their report."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster import goodput as ledger
from atoll.cluster.accounting import keep_accounting
from atoll.cluster.record import MEASURED, Outcome, outcomes
from atoll.cluster.status import queued_jobs, slurm_energy
from atoll.errors import UserError
from atoll.health.faults import Fault, faults
from atoll.plan.traffic import total
from atoll.proof.accounting import steps_counted
from atoll.report.tables import Rows, in_minutes, mebibytes, number
from atoll.settings import Run, load_run

WARM_UP = 1
EVENTS = (
    "start",
    "train",
    "communication",
    "evaluation",
    "energy",
    "checkpoint",
    "own_work",
    "preflight",
)
Record = dict[str, Any]


@dataclass(frozen=True)
class RunMetrics:
    """The settings of a run, and its metrics of each kind, in order."""

    settings: Run
    folder: Path
    starts: list[Record]
    train: list[Record]
    communication: list[Record]
    evaluations: list[Record]
    energy: list[Record]
    checkpoints: list[Record]
    own_work: list[Record]
    preflights: list[Record]

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def start(self) -> Record:
        return self.starts[0]

    @property
    def newest_start(self) -> Record:
        """As its steps or its ranks were changed the last time."""
        return self.starts[-1]

    @property
    def devices(self) -> int:
        return int(self.newest_start["ranks"])

    @property
    def steady(self) -> list[Record]:
        """The lines behind the first on as many ranks as now, where there are any."""
        since = 0
        for start in reversed(self.starts):
            if start["ranks"] != self.devices:
                break
            since = start.get("step", 0)
        own = [line for line in self.train if line["step"] > since] or self.train
        return own[WARM_UP:] or own

    @property
    def tokens_per_second(self) -> float:
        return float(statistics.median(line["tokens_per_second"] for line in self.steady))

    @property
    def seconds(self) -> float:
        """From its start to the last line it wrote, with the pauses between its jobs."""
        times = [line["time"] for line in (self.start, *self.train) if "time" in line]
        return float(max(times) - min(times)) if times else 0.0

    @cached_property
    def goodput(self) -> dict[str, float]:
        """Node-seconds by column; empty where its ranks never began."""
        return ledger.goodput(self.folder)

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """What it was expected to take beside what it took; none without a prediction."""
        return outcomes(self.folder, self.goodput)

    @property
    def step_seconds(self) -> float:
        return statistics.fmean(line["step_seconds"] for line in self.steady)


def read(folder: Path) -> RunMetrics:
    """A run's metrics.

    Raises `UserError` for a run that has taken no step.
    """
    records = run_dir.metrics(folder)
    events = {kind: [line for line in records if line["event"] == kind] for kind in EVENTS}
    if not events["start"] or not events["train"]:
        raise UserError(f"run {folder.name} has no steps to report", f"atoll status {folder.name}")
    settings = load_run(run_dir.settings_file(folder))
    keep_accounting(folder)
    return RunMetrics(settings, folder, *(events[kind] for kind in EVENTS))


def run_tables(runs: Sequence[RunMetrics], is_series: bool = True) -> dict[str, Rows]:
    """Title -> rows. Of a series: speed-up and efficiency over the run of fewest devices."""
    speed = [_scaling(run, runs[0]) if is_series else _speed(run) for run in runs]
    return {
        "Scaling" if is_series else "Speed": speed,
        "Communication per rank and step, MiB": [_sent(run) for run in runs if run.communication],
        "Predicted and measured": [row for run in runs for row in _outcomes(run)],
        "Scores": [row for run in runs for row in _scores(run)],
        "Checkpoints": [_checkpoints(run) for run in runs if run.checkpoints],
        "Goodput, node-minutes": [
            {"run": run.name, **in_minutes(columns)} for run in runs if (columns := run.goodput)
        ],
        "Energy": [row for run in runs for row in _energy(run)],
        "Faults": [_fault(run, fault) for run in runs for fault in faults(run.folder)],
        "Own work of nodes": [row for run in runs for row in _own_work(run)],
        "Before step 1": [row for run in runs for row in _preflight(run)],
        "Provenance": [
            {"run": run.name} | made_of
            for run in runs
            if (made_of := run.newest_start.get("made_of"))
        ],
    }


def _outcomes(run: RunMetrics) -> Rows:
    """Each figure before and after; a bound cannot be wrong on its other side."""
    return [
        {
            "run": run.name,
            "what": f"{kind.what}, {kind.unit}",
            "predicted": "" if outcome.predicted is None else f"{outcome.predicted:,.4g}",
            "measured": "" if outcome.measured is None else f"{outcome.measured:,.4g}",
            "error": "" if outcome.error is None else f"{outcome.error:+.1%}",
            "is": outcome.bound,
        }
        for outcome in run.outcomes
        for kind in [MEASURED[outcome.name]]
    ]


def _fault(run: RunMetrics, fault: Fault) -> dict[str, str]:
    rank = "" if fault.rank is None else str(fault.rank)
    where = {"run": run.name, "job": fault.job, "node": fault.node, "rank": rank}
    moment = "" if fault.step is None else str(fault.step)
    what = {"step": moment, "what": fault.kind, "against": fault.blame}
    return where | what | {"evidence": fault.evidence}


def _scores(run: RunMetrics) -> Rows:
    """What lm-evaluation-harness said of the export, behind the run."""
    file = run_dir.scores_file(run.folder)
    tasks = json.loads(file.read_text())["tasks"] if file.is_file() else {}
    return [
        {"run": run.name, "task": task, "figure": name, "value": number(value, 4)}
        for task, figures in tasks.items()
        for name, value in figures.items()
    ]


def _own_work(run: RunMetrics) -> Rows:
    """What the slowest nodes of the last start needed, without waiting for others."""
    return [
        {
            "run": run.name,
            "node": row["node"],
            "s a step": number(row["own_seconds"], 3),
            "of rank": str(row["slowest"]),
        }
        for row in (run.own_work[-1]["nodes"] if run.own_work else [])
    ]


def _preflight(run: RunMetrics) -> Rows:
    figures = run.preflights[-1] if run.preflights else {}
    return [
        {
            "run": run.name,
            "figure": name,
            "median": number(row["median"], 3),
            "lowest": number(row["lowest"], 3),
            "of rank": f"{row['rank']} on {row['node']}",
        }
        for name, row in figures.items()
        if isinstance(row, dict)
    ]


def _speed(run: RunMetrics) -> dict[str, str]:
    return _rate(run) | _epochs(run)


def _scaling(run: RunMetrics, base: RunMetrics) -> dict[str, str]:
    speed_up = run.tokens_per_second / base.tokens_per_second
    shares = {
        "speed-up": number(speed_up, 2),
        "efficiency": f"{speed_up * base.devices / run.devices:.0%}",
    }
    return _rate(run) | shares | _epochs(run)


def _rate(run: RunMetrics) -> dict[str, str]:
    return {
        "run": run.name,
        "devices": str(run.devices),
        "step s": number(run.step_seconds, 3),
        "tokens/s": f"{run.tokens_per_second:,.0f}",
    }


def _epochs(run: RunMetrics) -> dict[str, str]:
    losses = epoch_losses(run).items()
    return {f"training loss, epoch {n}": number(loss, 4) for n, loss in losses}


def epoch_losses(run: RunMetrics) -> dict[int, float]:
    """Epoch, from 1 -> its mean training loss, of the steps that were written down."""
    if run.settings.data.sources:  # each has epochs of its own
        return {}
    steps_per_epoch = run.start["training_samples"] / run.settings.training.global_batch_samples
    epochs: dict[int, list[float]] = {}
    for line in run.train:
        if line["loss"] is None:  # every batch of it was skipped
            continue
        epochs.setdefault(int((line["step"] - 1) / steps_per_epoch), []).append(line["loss"])
    return {at + 1: statistics.fmean(losses) for at, losses in sorted(epochs.items())}


def _sent(run: RunMetrics) -> dict[str, str]:
    """What a rank sent in the step that was profiled last: expected, observed, MiB."""
    profile = run.communication[-1]
    expected, kinds = total(profile["expected_bytes"]), profile["expected_bytes"].items()
    parts = (f"{name} {'unknown' if size is None else mebibytes(size)}" for name, size in kinds)
    calls = ["{collective} {shape} {dtype}".format(**call) for call in profile["collectives"]]
    return {
        "run": run.name,
        "batch": str(run.settings.training.global_batch_samples),
        "expected": "unknown" if expected is None else mebibytes(expected),
        "on wire": mebibytes(profile["wire_bytes"]),
        "differs": f"{profile['wire_bytes'] / expected - 1:+.1%}" if expected else "",
        "of step": f"{profile['seconds'] / run.step_seconds:.0%}",
        "largest call": next(iter(calls), ""),
        "for": ", ".join(parts),
    }


def _checkpoints(run: RunMetrics) -> dict[str, str]:
    """How many, how long until one was complete, and how long training stood still for it."""
    save = [line["save_seconds"] for line in run.checkpoints]
    blocked = [line["blocked_seconds"] for line in run.checkpoints]
    return {
        "run": run.name,
        "saved": str(len(save)),
        "s to save": number(statistics.fmean(save), 3),
        "blocked s": number(statistics.fmean(blocked), 3),
        "share": f"{sum(blocked) / sum(save):.1%}",
    }


def _energy(run: RunMetrics) -> Rows:
    """Of devices, of processors' packages, of whole nodes as Slurm has it; and how it is known."""
    steps, last = steps_counted(run.energy), run.train[-1]["step"]
    own = last - run.settings.checkpoint.initial_step
    rows = []
    for part, (energy, source) in joules(run).items():
        of_all = part == "nodes" or steps >= own
        tokens = run.train[-1]["tokens"] * (own if of_all else steps) / last
        rows.append(
            {
                "run": run.name,
                "of": part,
                "kWh": f"{energy / 3.6e6:.4g}",
                "J per token": f"{energy / tokens:.3g}" if tokens else "",
                "how": source if of_all else f"{source}, of {steps:,} of {own:,} steps",
            }
        )
    return rows


def joules(run: RunMetrics) -> dict[str, tuple[float, str]]:
    """What is known, over all starts of a run that came to an end of their own."""
    energy = {}
    for part in ("device", "package"):
        known = [line for line in run.energy if line[f"{part}_joules"] is not None]
        if known:
            sources = sorted({line[f"{part}_source"] for line in known})
            energy[f"{part}s"] = sum(line[f"{part}_joules"] for line in known), "; ".join(sources)
    nodes = slurm_energy(queued_jobs(run.folder))
    return energy | ({"nodes": nodes} if nodes else {})
