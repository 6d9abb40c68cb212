"""Talk to Slurm: the sbatch command of a run, and what Slurm answers."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.errors import UserError
from atoll.host.launchers import tasks
from atoll.settings import Run

# What a refusal is about -> the settings that carry it. Slurm's own words are shown above.
SETTINGS_BEHIND = {
    "account": "facility.account",
    "partition": "facility.submit.partition",
    "qos": "facility.submit.qos",
    "time limit": "facility.walltime_minutes",
    "node count": "nodes",
    "node configuration": "nodes, ranks_per_node, facility.node.cores",
    "gres": "facility.submit",
}


def sbatch_argv(run: Run, batch_file: Path, run_folder: Path) -> list[str]:
    """The command that queues a run; `facility.submit` adds to our flags and wins over them."""
    wanted = tasks(run)
    flags = {
        "job-name": run.name,
        "nodes": run.nodes,
        "ntasks-per-node": wanted.per_node,
        "cpus-per-task": wanted.cores,
        "time": run.facility.walltime_minutes,
        "account": run.facility.account,
        "output": f"{run_folder}/slurm-%j.out",
        "dependency": "singleton",  # the same run is never trained by two jobs at once
        **run.facility.submit,
    }
    return ["sbatch", "--parsable", *_as_words(flags), str(batch_file), str(run_folder)]


def queued(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Queue a job and return its id.

    Raises `UserError` with Slurm's own words if it refuses.
    """
    try:
        done = subprocess.run(argv, env=dict(environment), capture_output=True, text=True)
    except OSError as error:
        raise UserError(
            f"cannot start {argv[0]}: {error.strerror}",
            "submit from a login node of the facility, or choose one without a scheduler",
        ) from None
    if done.returncode != 0:
        raise refusal(argv[0], done.stderr or done.stdout or f"exit code {done.returncode}")
    return done.stdout.strip().split(";")[0]


def refusal(program: str, words: str) -> UserError:
    """Slurm's own words on one line, and the settings they are about."""
    lines = [line.removeprefix(f"{program}: error: ").strip() for line in words.splitlines()]
    settings = [name for word, name in SETTINGS_BEHIND.items() if word in words.lower()]
    mend = f"see {', '.join(settings)}" if settings else "`--dry-run` prints the whole command"
    return UserError(f"{program}: {'; '.join(line for line in lines if line)}", mend)


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a new job: an allocation around us would speak for it."""
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    keep = re.compile(r"(?!SLURM_)|SLURM_CONF$")
    return {name: value for name, value in environment.items() if keep.match(name)}


def _as_words(flags: Mapping[str, str | int | bool | None]) -> list[str]:
    """True is a flag alone, None and False are no flag."""
    given = {
        name: value for name, value in flags.items() if value is not None and value is not False
    }
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
