"""What a run will take, said before it is queued and kept in its folder."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime

from atoll import run_dir
from atoll.cluster.fit import shape_known_here
from atoll.cluster.scheduler import without_outer_job
from atoll.commands import run_command
from atoll.config import certificate
from atoll.errors import UserError
from atoll.plan.own_processors import as_computed_here
from atoll.plan.prediction import Prediction, in_a_line, predict, steps_taken
from atoll.proof.statement import own_version
from atoll.settings import Run

UP_TO = "in its first job up to"  # where the time of a step is not known
ASK_SECONDS = 5.0  # for which the scheduler's guess and the account's budget are waited for
# sbatch: Job 42 to start at 2026-11-24T03:00:00 using 4 processors on nodes … in partition …
TO_START = re.compile(r"Job \d+ to start at (\d{4}-\d\d-\d\d)T(\d\d:\d\d)")


def prediction_of(run: Run) -> Prediction | None:
    """None for a run without steps, and where this machine does not know the model's shape."""
    shape = shape_known_here(run)
    if shape is None or run.training.steps == 0:
        return None
    rates, calibration = certificate.rates(run), certificate.calibration(run)
    write_gb_s = certificate.file_write_gb_s(run)
    return predict(as_computed_here(run), shape, rates, calibration, write_gb_s)


def keep_prediction(run: Run) -> None:
    """Write what a run will take into its folder, anew at each submission: its settings decide."""
    prediction, file = prediction_of(run), run_dir.prediction_file(run_dir.folder(run))
    if prediction is None:
        file.unlink(missing_ok=True)
        return
    record = prediction.record(run, own_version())
    run_dir.write_whole(file, json.dumps(record, indent=1) + "\n")


def line(run: Run) -> str:
    """What a run will take, in one line; nothing for one that starts here and has no rates."""
    prediction = prediction_of(run)
    is_timed = prediction is not None and prediction.step_seconds is not None
    if run.training.steps == 0 or (run.facility.scheduler == "none" and not is_timed):
        return ""
    if prediction is None:
        return f"{run.name}: time ?; ? GiB a device: its shape is not known here"
    return f"{run.name}: {in_a_line(prediction, run)}"


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


def seconds_until(start: str) -> float:
    """From now; a start that has passed is now."""
    return max(0.0, (datetime.strptime(start, "%Y-%m-%d %H:%M") - datetime.now()).total_seconds())


def keep_expected_wait(run: Run, seconds: float) -> None:
    """Put what Slurm expected into a queued run's prediction."""
    file = run_dir.prediction_file(run_dir.folder(run))
    if not file.is_file():
        return
    kept = json.loads(file.read_text())
    kept["predicted"]["queue_seconds"] = {"value": seconds, "unit": "s", "bound": ""}
    run_dir.write_whole(file, json.dumps(kept, indent=1) + "\n")


def node_hours_left(run: Run) -> float | None:
    """What the facility's own command says its account has left; None where it says nothing."""
    budget, account = run.facility.budget, run.facility.account
    words = [word.replace("{account}", account or "") for word in budget.command]
    if not words or budget.pattern is None or (account is None and words != budget.command):
        return None
    pattern = budget.pattern.replace("{account}", re.escape(account or ""))
    done = run_command(words, timeout_seconds=ASK_SECONDS)
    either_case = re.MULTILINE | re.IGNORECASE  # of the account's name: Slurm takes both
    hours = re.search(pattern, done.stdout, either_case) if done.returncode == 0 else None
    if hours is None:
        return None
    try:
        numbers = {name: _number(text) for name, text in hours.groupdict().items()}
        left = numbers["granted"] - numbers["used"] if numbers else _number(hours[1])
    except ValueError:
        return None
    return left / budget.per_node_hour


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def confirm(run: Run, is_said: bool, hours_left: float | None = None) -> None:
    """Refuse what the account cannot pay, and ask a person before a large run is queued.

    is_said: `--yes` was given; hours_left: node-hours of the account, where they are known.
    Raises `UserError` where nobody agrees.
    """
    most = run.confirm.node_hours
    if is_said or (most is None and hours_left is None):
        return
    needed, how = _node_hours(run)
    if hours_left is not None and how != UP_TO and needed > hours_left:
        raise _too_dear(run, needed, how, hours_left)
    if most is None or needed < most:
        return
    what = f"run {run.name} takes {how} {needed:,.3g} node-hours (confirm.node_hours={most:g})"
    if not sys.stdin.isatty():
        raise UserError(
            what,
            "`atoll submit --yes …` queues it without a question; for a campaign's round the "
            "facility's owner sets confirm.node_hours higher, or null",
        )
    print(f"{what}; queue it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"run {run.name} is not queued", "answer y, or give --yes")


def _too_dear(run: Run, needed: float, how: str, hours_left: float) -> UserError:
    steps = steps_taken(run)
    fewer = 0 if steps is None else int(steps * hours_left / needed)
    fitting = f"training.steps={run.checkpoint.initial_step + fewer} fits; " if fewer else ""
    return UserError(
        f"run {run.name} takes {how} {needed:,.3g} node-hours, and {run.facility.account or 'it'} "
        f"has {hours_left:,.4g} left",
        f"{fitting}--yes queues it all the same",
    )


def _node_hours(run: Run) -> tuple[float, str]:
    """What a run takes at least; where that is unknown, what its first job may take."""
    prediction = prediction_of(run)
    if prediction is not None and prediction.node_hours is not None:
        return prediction.node_hours, "at least" if prediction.is_bound else "about"
    return run.job_nodes * (run.facility.walltime_minutes or 0) / 60, UP_TO
