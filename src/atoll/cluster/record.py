"""What runs were expected to take beside what they took, and how far off that was."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.goodput import goodput
from atoll.errors import UserError
from atoll.plan.prediction import QUANTITIES, Quantity
from atoll.proof.accounting import steps_counted
from atoll.settings import Run, load_run
from atoll.tables import table

MEASURED = {**QUANTITIES, "queue_seconds": Quantity("in the queue", "s")}
RECORDED = (
    *("memory_gib", "checkpoint_gib", "sent_mib", "step_seconds", "hours"),
    *("node_hours", "device_kwh", "queue_seconds"),
)
WARM_UP = 1  # lines


@dataclass(frozen=True)
class Outcome:
    """One figure of a run, before and after; None: not known."""

    name: str  # in MEASURED
    predicted: float | None
    measured: float | None
    bound: str = ""  # the side that the prediction can only be wrong on

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        return None if not self.measured or self.predicted is None else self.ratio - 1

    @property
    def ratio(self) -> float:
        return (self.predicted or 0.0) / (self.measured or 1.0)


def outcomes(folder: Path, node_seconds: Mapping[str, float] | None = None) -> list[Outcome]:
    """What was predicted, what was measured, or both; none for a run without a prediction.

    node_seconds: the run's goodput, if it is known already.
    """
    predicted = run_dir.predicted(folder)
    if not predicted:
        return []
    run = load_run(run_dir.settings_file(folder))
    columns = goodput(folder) if node_seconds is None else node_seconds
    after = measured(folder, run, columns)
    bounds = run_dir.predicted(folder, "bound")
    each = [
        Outcome(name, predicted.get(name), after.get(name), bounds.get(name) or "")
        for name in MEASURED
    ]
    return [one for one in each if one.predicted is not None or one.measured is not None]


def measured(folder: Path, run: Run, columns: Mapping[str, float]) -> dict[str, float]:
    """What a run took, in the units of its prediction; empty where its ranks were others."""
    lines = run_dir.metrics(folder)
    steps, starts = _of(lines, "train"), _of(lines, "start")
    if not steps or not starts or any(x["ranks"] != run.world_size for x in starts):
        return {}
    steady = steps[WARM_UP:] or steps
    figures = {
        "memory_gib": max(line["memory_gib"] for line in steps),
        "step_seconds": statistics.median(line["step_seconds"] for line in steady),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steady),
    }
    for profile in _of(lines, "communication")[-1:]:
        figures["sent_mib"] = profile["wire_bytes"] / 2**20
    if saved := run_dir.complete_checkpoints(folder):
        figures["checkpoint_gib"] = _bytes_in(run_dir.checkpoint(folder, saved[-1])) / 2**30
    if run.facility.scheduler != "none" and columns.get("queue"):
        figures["queue_seconds"] = columns["queue"] / run.job_nodes
    if steps[-1]["step"] == starts[-1].get("steps"):  # else all of it is not over yet
        figures |= _whole_run(lines, columns)
    return figures


def _whole_run(lines: Sequence[dict[str, Any]], columns: Mapping[str, float]) -> dict[str, float]:
    figures, at = {"hours": 0.0}, _of(lines, "start")[0].get("step", 0)
    for line in _of(lines, "train"):
        figures["hours"] += max(0, line["step"] - at) * line["step_seconds"] / 3600
        at = line["step"]
    if held := sum(seconds for name, seconds in columns.items() if name != "queue"):
        figures["node_hours"] = held / 3600
    known = _of(lines, "energy")
    joules = [line["device_joules"] for line in known]
    own = at - _of(lines, "start")[0].get("step", 0)
    if joules and None not in joules and steps_counted(known) >= own:
        figures["device_kwh"] = sum(joules) / 3.6e6
    return figures


def _of(lines: Iterable[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def strategy_of(run: Run) -> str:
    """As the planner names it."""
    again = run.training.activation_checkpointing
    return run.sharding.name + ("" if again == "none" else f", recompute {again}")


def record_of(folder: Path) -> list[dict[str, Any]]:
    """By facility and strategy, the errors of all predictions in a folder of runs.

    Raises `UserError` where no run there has both a prediction and what came of it.
    """
    errors: dict[tuple[str, str, str], list[float]] = {}
    for file in sorted(folder.glob("*/prediction.json")):
        try:
            run = load_run(run_dir.settings_file(file.parent))
            every = _asking_nobody(file.parent, run)
        except (UserError, OSError, ValueError, KeyError):  # of another Atoll, or half a folder
            continue
        for one in every:
            if one.name in RECORDED and one.error is not None:
                key = (run.facility.name, strategy_of(run), one.name)
                errors.setdefault(key, []).append(one.error)
    if not errors:
        raise UserError(
            f"no run in {folder} has both a prediction and steps to hold it against",
            "give the folder of runs: atoll plan --record FOLDER",
        )
    return [
        {
            "facility": facility,
            "strategy": strategy,
            "what": name,
            "runs": len(each),
            "median_error": statistics.median(each),
            "worst_error": max(each, key=abs),
        }
        for (facility, strategy, name), each in sorted(errors.items())
    ]


def _asking_nobody(folder: Path, run: Run) -> list[Outcome]:
    """Node-seconds as far as they are kept, for the scheduler is not asked of each run."""
    is_kept = run.facility.scheduler == "none" or run_dir.accounting_file(folder).is_file()
    return outcomes(folder, goodput(folder) if is_kept else {})


def record_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The record for a person; the error of a time at stated peaks is below zero."""
    cells = [
        [
            row["facility"],
            row["strategy"],
            MEASURED[row["what"]].what,
            row["runs"],
            f"{row['median_error']:+.1%}",
            f"{row['worst_error']:+.1%}",
        ]
        for row in rows
    ]
    columns = ["facility", "strategy", "predicted", "runs", "median error", "worst error"]
    return table(columns, cells)
