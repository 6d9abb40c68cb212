"""What a facility's finished runs teach its next predictions, kept in its certificate."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.fit import shape_known_here
from atoll.cluster.goodput import by_itself, job_starts, ledger, noted, ranks_starts
from atoll.cluster.record import measured
from atoll.config import certificate
from atoll.errors import UserError
from atoll.health.faults import faults
from atoll.plan.calibration import MOST_RUNS, Sample, calibration_of, strategy_family
from atoll.plan.own_processors import as_computed_here
from atoll.plan.prediction import predict
from atoll.settings import Run, load_run

LEAST_LINES = 3  # of training, of a run that counts: the first warms up


def learn(run: Run) -> None:
    """Learn anew from the facility's runs beside this one, if any has finished since."""
    known = certificate.calibration(run) or {}
    results = _results(run)
    newest = max((result.stat().st_mtime for result in results), default=0.0)
    rates = certificate.rates(run)
    basis = [newest, None if rates is None else [rates.get("measured_on"), rates.get("links")]]
    since = known.get("since", 0.0)
    if not results or basis == known.get("basis"):
        return
    samples: list[Sample] = []
    for result in results:
        if result.stat().st_mtime > since and len(samples) < MOST_RUNS:
            samples += _sample(result.parent, run.facility.name, rates)
    if not samples and not known:
        return
    learned = calibration_of(samples) | {"basis": basis, "since": since}
    run_dir.add_to_certificate(run, {"calibration": learned})


def forget(run: Run) -> str:
    """Drop what runs taught; those that finished until now teach nothing again."""
    known = certificate.calibration(run)
    if known is None:
        raise UserError(
            f"nothing was learned from runs on {run.facility.name}",
            "atoll submit learns from finished runs by itself",
        )
    nothing = calibration_of([]) | {"basis": None, "since": time.time()}
    run_dir.add_to_certificate(run, {"calibration": nothing})
    return f"{run_dir.certificate(run)}: the runs until now are forgotten"


def _results(run: Run) -> list[Path]:
    """Of runs that reached their end, the newest first."""
    files = run.folders.runs.glob("*/result.json")
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def _sample(folder: Path, facility: str, rates: dict[str, Any] | None) -> Iterator[Sample]:
    """What one run teaches: nothing where it was another facility's, or met a fault."""
    with suppress(UserError, OSError, ValueError, KeyError):  # of another Atoll, or half a folder
        prediction = json.loads(run_dir.prediction_file(folder).read_text())
        if prediction.get("facility") != facility or faults(folder):
            return
        run = load_run(run_dir.settings_file(folder))
        shape, took = shape_known_here(run), measured(folder, run, {})
        lines = [line for line in run_dir.metrics(folder) if line["event"] == "train"]
        if shape is None or not took or len(lines) < LEAST_LINES:
            return
        plan = predict(as_computed_here(run), shape, rates)
        yield Sample(
            strategy_family(run),
            plan.step_seconds,
            took["step_seconds"],
            plan.memory_gib,
            took["memory_gib"],
            *_beside_steps(folder, run.job_nodes),
        )


def _beside_steps(folder: Path, nodes: int) -> tuple[float | None, float | None]:
    """Seconds from its first job's begin to the first step, and from the last line to the end."""
    lines = ledger(folder)
    starts = ranks_starts(lines)
    is_kept = run_dir.accounting_file(folder).is_file()
    jobs = (job_starts(folder) if is_kept else noted(folder, nodes)) or by_itself(lines, nodes)
    before = [job for job in jobs if job.started <= starts[0].began] if starts else []
    if not before:
        return None, None
    start = starts[0].began - before[-1].started
    behind = jobs[-1].ended - float(lines[-1]["time"])  # 0: when it ended is not known
    return start, behind if behind > 0 and lines[-1]["event"] == "end" else None
