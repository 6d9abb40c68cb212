"""What a run will take, said before it is queued and kept in its folder."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata

from atoll import run_dir
from atoll.cluster.fit import shape_known_here
from atoll.cluster.scheduler import without_outer_job
from atoll.commands import run_command
from atoll.errors import UserError
from atoll.plan.prediction import Prediction, in_a_line, predict
from atoll.settings import Run

ASK_SECONDS = 5.0  # for which the scheduler's guess and the account's budget are waited for
# sbatch: Job 42 to start at 2026-11-24T03:00:00 using 4 processors on nodes … in partition …
TO_START = re.compile(r"Job \d+ to start at (\d{4}-\d\d-\d\d)T(\d\d:\d\d)")


def prediction_of(run: Run) -> Prediction | None:
    """None for a run without steps, and where this machine does not know the model's shape."""
    shape = shape_known_here(run)
    return None if shape is None or run.training.steps == 0 else predict(run, shape)


def keep_prediction(run: Run) -> None:
    """Write what a run will take into its folder, anew at each submission: its settings decide."""
    prediction, file = prediction_of(run), run_dir.prediction_file(run_dir.folder(run))
    if prediction is None:
        file.unlink(missing_ok=True)
        return
    version = "unknown"
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("atoll")
    run_dir.write_whole(file, json.dumps(prediction.record(run, version), indent=1) + "\n")


def line(run: Run) -> str:
    """What a queued run will take, in one line; nothing for one that no scheduler takes."""
    prediction = prediction_of(run)
    if run.facility.scheduler == "none" or run.training.steps == 0:
        return ""
    if prediction is None:
        return f"{run.name}: time ?; ? GiB a device: its shape is not known here"
    return f"{run.name}: {in_a_line(prediction, run)}"


def asked_of_facility(run: Run, argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """What the facility says itself: when the job may start, what its account has left."""
    begin = expected_start(argv, environment) if run.facility.scheduler == "slurm" else None
    left = budget_left(run)
    start = "" if begin is None else f"; expected to start {begin}"
    return start + ("" if left is None else f"; {left} node-hours left")


def expected_start(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """When Slurm would start this job now; None where it does not say so soon."""
    command = [argv[0], "--test-only", *argv[1:]]
    words = without_outer_job(environment)
    done = run_command(command, environment=words, timeout_seconds=ASK_SECONDS)
    return start_in(f"{done.stderr}\n{done.stdout}") if done.returncode == 0 else None


def start_in(words: str) -> str | None:
    """The date and minute in sbatch's answer to --test-only."""
    found = TO_START.search(words)
    return None if found is None else f"{found[1]} {found[2]}"


def budget_left(run: Run) -> str | None:
    """The node-hours that the facility's own command says are left; None where it says none."""
    budget = run.facility.budget
    if not budget.command or budget.pattern is None:
        return None
    done = run_command(budget.command, timeout_seconds=ASK_SECONDS)
    found = re.search(budget.pattern, done.stdout) if done.returncode == 0 else None
    return None if found is None else found[1]


def confirm(run: Run, is_said: bool) -> None:
    """Ask a person before a large run is queued.

    is_said: `--yes` was given. Raises `UserError` where nobody agrees.
    """
    most = run.confirm.node_hours
    if most is None or is_said:
        return
    needed, how = _node_hours(run)
    if needed < most:
        return
    what = f"run {run.name} takes {how} {needed:,.3g} node-hours (confirm.node_hours={most:g})"
    if not sys.stdin.isatty():
        raise UserError(what, "`atoll submit --yes …` queues it without a question")
    print(f"{what}; queue it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"run {run.name} is not queued", "answer y, or give --yes")


def _node_hours(run: Run) -> tuple[float, str]:
    """What a run takes at least; where that is unknown, what its first job may take."""
    prediction = prediction_of(run)
    if prediction is not None and prediction.node_hours is not None:
        return prediction.node_hours, "at least"
    return run.job_nodes * (run.facility.walltime_minutes or 0) / 60, "in its first job up to"
