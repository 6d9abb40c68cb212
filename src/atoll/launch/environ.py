"""Reading what schedulers leave in the environment: numbers, the step, the file of nodes."""

from collections.abc import Mapping
from pathlib import Path

from atoll.errors import UserError

# The batch, external and interactive steps of a job, by name and as Slurm numbers them.
_NOT_A_STEP = {"batch", "extern", "interactive", "4294967291", "4294967292", "4294967290"}


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Read a variable that is a number from 0 up. Raises UserError where it is anything else."""
    text = environ[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(f"{name}={text!r} in the environment", f"{name} is a number from 0 up")
    return int(text)


def agreed_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Read a number that several variables may state. Raises UserError where they differ."""
    stated = {name: whole_number(environ, name) for name in names if name in environ}
    if len(set(stated.values())) > 1:
        raise UserError(
            " but ".join(f"{name}={number}" for name, number in stated.items()),
            "start the ranks with one launcher only, or unset the other's variables",
        )
    return next(iter(stated.values()), None)


def step_task_count(environ: Mapping[str, str]) -> int:
    """Count the tasks of the Slurm step this process is in; 0 outside a step."""
    if "SLURM_STEP_NUM_TASKS" not in environ or environ.get("SLURM_STEP_ID") in _NOT_A_STEP:
        return 0
    return whole_number(environ, "SLURM_STEP_NUM_TASKS")


def node_file_hosts(path: str) -> list[str]:
    """Read the distinct hosts of a PBS node file, in its order. Raises UserError without any."""
    try:
        hosts = Path(path).read_text().split()
    except OSError as error:
        raise UserError(
            f"PBS_NODEFILE={path}: {error.strerror}",
            "bind the file into the container, or set MASTER_ADDR",
        ) from None
    if not hosts:
        raise UserError(f"PBS_NODEFILE={path} is empty", "set MASTER_ADDR to the host of rank 0")
    return list(dict.fromkeys(hosts))
