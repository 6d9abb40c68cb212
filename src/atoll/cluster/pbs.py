"""Talk to PBS: the qsub command of a run, and how it goes on in another job after its time."""

import re
import shlex
from pathlib import Path

from atoll.settings import Run
from atoll.settings.machine import SubmitFlag

WALLTIME = re.compile(r"\bwalltime=(\d+(?::\d+){0,2})\b")  # [[hours:]minutes:]seconds

# PBS cannot requeue a running job: the run goes on in a job that waits for this one.
REQUEUE = """\
requeue() {{
    note_job "$({chain})"
}}
"""


def qsub_argv(run: Run, batch_file: Path, run_folder: Path) -> list[str]:
    """The command that queues a run; `facility.submit` adds to our flags and wins over them."""
    flags: dict[str, SubmitFlag] = {
        "N": run.name[:64],
        "A": run.facility.account,
        "j": "oe",
        "o": f"{run_folder}/pbs.out",
        **run.facility.submit,
        "l": [*_resources(run)],
    }
    words = [
        word
        for name, value in flags.items()
        for given in (value if isinstance(value, list) else [value])
        if given is not None and given is not False
        for word in ([f"-{name}"] if given is True else [f"-{name}", str(given)])
    ]
    return ["qsub", *words, "--", str(batch_file), str(run_folder)]


def behind_argv(run: Run, run_folder: Path, script: Path, job: str) -> list[str]:
    """The command that queues a script behind a job of the run, on as many nodes."""
    named = run.model_copy(update={"name": f"{run.name[:59]}-then"})
    qsub, *words = qsub_argv(named, script, run_folder)
    flags = [w.replace(f"{run_folder}/pbs.out", f"{run_folder}/then.out") for w in words[:-2]]
    return [qsub, "-W", f"depend=afterany:{job}", *flags, "/bin/bash", str(script)]


def requeue_function(run: Run, run_folder: Path, batch_file: Path | None) -> str:
    """Shell text for `launch.sh`: the function by which its job requeues the run."""
    chain = "false"
    if batch_file:
        qsub, *words = qsub_argv(run, batch_file, run_folder)
        chain = f'{qsub} -W depend=afterany:"$job" {shlex.join(words)}'
    return REQUEUE.format(chain=chain)


def walltime_seconds(run: Run) -> int | None:
    """Of a job: as one of the facility's `-l` words has it, else the setting; None: unlimited."""
    stated = next(filter(None, map(WALLTIME.search, _stated(run))), None)
    if stated is not None:
        parts = [int(part) for part in str(stated[1]).split(":")]
        return sum(part * int(60**place) for place, part in enumerate(reversed(parts)))
    minutes = run.facility.walltime_minutes
    return None if minutes is None else 60 * minutes


def _stated(run: Run) -> list[str]:
    given = run.facility.submit.get("l")
    return [str(word) for word in (given if isinstance(given, list) else [given]) if word]


def _resources(run: Run) -> list[str]:
    """The `-l` words of the facility, and the wall time unless one of them states it."""
    words, minutes = _stated(run), run.facility.walltime_minutes
    if minutes is None or any("walltime=" in word for word in words):
        return words
    return [*words, f"walltime={minutes // 60:02}:{minutes % 60:02}:00"]
