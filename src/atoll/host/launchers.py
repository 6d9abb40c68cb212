"""From a run to the command that starts its ranks: one function for each launcher."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.host.apptainer import container_prefix
from atoll.settings import Run


@dataclass(frozen=True)
class Tasks:
    """The tasks a launcher starts on each node, and the cores of each (None: not known)."""

    per_node: int
    cores: int | None


def tasks(run: Run) -> Tasks:
    """How many tasks the run's launcher wants on a node, and what each of them gets."""
    per_node = TASKS_PER_NODE[run.launcher.name](run)
    cores = run.facility.node.cores
    return Tasks(per_node, max(1, cores // per_node) if cores else None)


def launch_step(run: Run, run_folder: Path) -> list[str]:
    """The command that trains the run, on all its nodes."""
    return LAUNCHERS[run.launcher.name](run, run_folder)


def static(run: Run, run_folder: Path) -> list[str]:
    """One task per device, in place; without a scheduler one process starts the tasks."""
    if run.facility.scheduler == "none":
        return _launch(run, run_folder, ["--local-ranks", str(run.ranks_per_node)])
    return [*_srun(run), *_launch(run, run_folder, [])]


def static_node(run: Run, run_folder: Path) -> list[str]:
    """One task per node, which forks the node's ranks."""
    start = [] if run.facility.scheduler == "none" else _srun(run)
    return [*start, *_launch(run, run_folder, ["--fork", str(run.ranks_per_node)])]


LAUNCHERS: dict[str, Callable[[Run, Path], list[str]]] = {
    "static": static,
    "static_node": static_node,
}
TASKS_PER_NODE: dict[str, Callable[[Run], int]] = {
    "static": lambda run: run.ranks_per_node,
    "static_node": lambda run: 1,
}


def atoll_command(run: Run) -> list[str]:
    """`atoll`, in the run's container or in the environment this process runs from."""
    prefix = container_prefix(run.image, run.facility.binds)
    return [*prefix, "python3" if prefix else sys.executable, "-m", "atoll"]


def _srun(run: Run) -> list[str]:
    """All of the step is stated here: srun inherits too little, and differently by version."""
    wanted = tasks(run)
    cores = [] if wanted.cores is None else [f"--cpus-per-task={wanted.cores}"]
    return [
        "srun",
        f"--nodes={run.nodes}",
        f"--ntasks={run.nodes * wanted.per_node}",
        f"--ntasks-per-node={wanted.per_node}",
        *cores,
        "--kill-on-bad-exit=1",
        *run.facility.step,
    ]


def _launch(run: Run, run_folder: Path, ranks: list[str]) -> list[str]:
    facility = run.facility
    port = [] if facility.port is None else ["--port", str(facility.port)]
    suffix = ["--address-suffix", facility.address_suffix] if facility.address_suffix else []
    return [*atoll_command(run), "launch", *port, *suffix, *ranks, str(run_folder)]
