"""A facility's environment modules, in its jobs and for what is typed outside of one."""

import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

from atoll.cluster.launchers import atoll_command
from atoll.commands import run_command
from atoll.config.binds import shared_caches
from atoll.errors import UserError
from atoll.settings import Run
from atoll.settings.machine import Facility

MODULE_SYSTEM = "source /etc/profile\n"  # what makes `module` known to a shell


def load_modules(facility: Facility) -> str:
    """The lines of a script that load them; none without modules."""
    named = facility.modules
    words = [["module", "use", folder] for folder in named.use]
    words += [["module", "load", name] for name in named.load]
    lines = [f"{shlex.join(argv)}\n" for argv in words]
    return "".join([MODULE_SYSTEM, *lines]) if lines else ""


def atoll_outside_jobs(run: Run) -> list[str]:
    """`atoll` as a job has it: where the container's program is a module, that is loaded first.

    Where it is on compute nodes alone, by the environment this process runs from; `UserError` where
    that has no torch.
    """
    program = run.facility.container
    if run.image.file is None:
        return atoll_command(run)
    if shutil.which(program):
        return atoll_command(_with_folders_there(run))
    modules = load_modules(run.facility)
    if run_command(["bash", "-c", f'{modules}command -v "$0"', program]).returncode:
        if find_spec("torch") is not None:
            return atoll_command(_without_image(run))
        tried = f", nor after module load {' '.join(run.facility.modules.load)}" if modules else ""
        raise UserError(
            f"no {program} on this machine's PATH{tried}: it is to run {run.image.file}",
            f"type it where {program} is, or once after make setup, whose environment then does it",
        )
    command = atoll_command(_with_folders_there(run))
    return ["bash", "-c", f'{modules}exec "$@"\n', "bash", *command]


def _with_folders_there(run: Run) -> Run:
    """The run with its caches made, and without folders that only compute nodes can have.

    No container begins without a folder that it binds.
    """
    there = {name: path for name, path in shared_caches(run).items() if _is_made(path)}
    folders, own = run.folders.model_copy(update={"caches": there}), run.facility.node_folder
    node_folder = own if own is not None and own.is_dir() else None
    facility = run.facility.model_copy(update={"node_folder": node_folder})
    return run.model_copy(update={"folders": folders, "facility": facility})


def _without_image(run: Run) -> Run:
    return run.model_copy(update={"image": run.image.model_copy(update={"file": None})})


def _is_made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True
