"""Hand a command to a scheduler, and pass on its own words when it refuses."""

import re
from collections.abc import Mapping, Sequence

from atoll.commands import MISSING, run_command
from atoll.errors import UserError

# What a refusal is about -> the settings that carry it. The scheduler's words are shown above.
SETTINGS_BEHIND = {
    "account": "facility.account",
    "project": "facility.account",
    "partition": "facility.submit.partition",
    "queue": "facility.submit.q",
    "qos": "facility.submit.qos",
    "time limit": "facility.walltime_minutes",
    "walltime": "facility.walltime_minutes",
    "node count": "nodes",
    "node configuration": "nodes, ranks_per_node, facility.node.cores",
    "gres": "facility.submit",
    "select": "facility.submit.l",
}

# alone on its line: 4711;cluster of sbatch --parsable, 4711.server of qsub
JOB_ID = re.compile(
    r"(?:Submitted batch job )?([0-9]+(?:\[[0-9]*\])?(?:\.[A-Za-z0-9._-]+)?)(?:;\S*)?$"
)


def queued(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Queue a job and return its id.

    Raises `UserError` with the scheduler's own words if it refuses.
    """
    done = run_command(argv, environment=environment)
    if done.returncode == MISSING:
        raise UserError(
            done.last_line,
            "submit from a login node of the facility, or choose one without a scheduler",
        )
    if done.returncode != 0:
        raise refusal(argv[0], done.stderr or done.stdout or done.last_line)
    ids = [match[1] for line in done.stdout.splitlines() if (match := JOB_ID.match(line.strip()))]
    if not ids:
        raise UserError(
            f"{argv[0]} printed no job id: {done.last_line}",
            "see squeue or qstat: the job may be queued",
        )
    return ids[-1]  # what a site greets with comes before it


def answer_lines(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """The lines that a program of the facility prints; none where it is missing or fails."""
    done = run_command(argv, environment=environment)
    lines = [line.strip() for line in done.stdout.splitlines()]
    return [line for line in lines if line] if done.returncode == 0 else []


def refusal(program: str, words: str) -> UserError:
    """The scheduler's own words on one line, and the settings they are about."""
    lines = [line.removeprefix(f"{program}: error: ").strip() for line in words.splitlines()]
    settings = [name for word, name in SETTINGS_BEHIND.items() if word in words.lower()]
    hint = f"see {', '.join(settings)}" if settings else "`--dry-run` prints the whole command"
    return UserError(f"{program}: {'; '.join(line for line in lines if line)}", hint)


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a new job: an allocation around us would speak for it."""
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    keep = re.compile(r"(?!SLURM_)|SLURM_CONF$")
    return {name: value for name, value in environment.items() if keep.match(name)}
