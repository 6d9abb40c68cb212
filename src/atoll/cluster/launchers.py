"""From a run to the command that starts its ranks: one function for each launcher."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from atoll.cluster.container import container_prefix
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


def launch_step(run: Run, run_folder: Path, entrypoint: str | None = None) -> list[str]:
    """The command that runs `module:function` (None: train) on all ranks of the run."""
    return [*LAUNCHERS[run.launcher.name](run, run_folder), *([entrypoint] if entrypoint else [])]


def on_each_rank(run: Run, name: str, words: list[str]) -> list[str]:
    """The argv that runs `atoll NAME` as every rank, in a task of its own."""
    command = [*atoll_command(run), name]
    if run.facility.scheduler == "none":
        return [*command, f"--local-ranks={run.ranks_per_node}", *words]
    if run.launcher.name == "mpiexec":
        return [*_mpiexec(run), *command, *_bound(run), *words]
    static = run.launcher.model_copy(update={"name": "static"})
    return [*_srun(run.model_copy(update={"launcher": static})), *command, *words]


def static(run: Run, run_folder: Path) -> list[str]:
    """One task per device, in place; without a scheduler one process starts the tasks."""
    if run.facility.scheduler == "none":
        return _launch(run, run_folder, "--local-ranks")
    return [*_srun(run), *_launch(run, run_folder)]


def static_node(run: Run, run_folder: Path) -> list[str]:
    """One task per node, which forks the node's ranks."""
    return [*_srun(run), *_launch(run, run_folder, "--fork")]


def torchrun(run: Run, run_folder: Path) -> list[str]:
    """One task per node, which becomes the agent that torch brings along."""
    return [*_srun(run), *_launch(run, run_folder, "--torchrun")]


def mpiexec(run: Run, run_folder: Path) -> list[str]:
    """One task per device, as MPICH's and PALS's `mpiexec` start them."""
    *task, folder = _launch(run, run_folder)
    return [*_mpiexec(run), *task, *_bound(run), folder]


def ssh(run: Run, run_folder: Path) -> list[str]:
    """One task per machine of the facility's file, over ssh, which forks the machine's ranks."""
    facility = run.facility
    words: dict[str, object] = {"hosts": facility.hosts_file, "nodes": run.nodes}
    words |= {"ranks": run.ranks_per_node, "port": facility.port}
    words |= {"address-suffix": facility.address_suffix or None}
    head = [sys.executable, "-m", "atoll", "over-ssh"]
    head += [f"--{name}={value}" for name, value in words.items() if value is not None]
    head += [f"--variable={name}" for name in (SAFE_PATH, *exported(run))]
    head += [f"--ssh-option={word}" for word in facility.ssh_options]
    task = _launch(run, run_folder, "--fork")
    return [*head, "--", *task[:-1], "--follow-stdin", task[-1]]


LAUNCHERS: dict[str, Callable[[Run, Path], list[str]]] = {
    "static": static,
    "static_node": static_node,
    "torchrun": torchrun,
    "mpiexec": mpiexec,
    "ssh": ssh,
}
TASKS_PER_NODE: dict[str, Callable[[Run], int]] = {
    "static": lambda run: run.ranks_per_node,
    "static_node": lambda run: 1,
    "torchrun": lambda run: 1,
    "mpiexec": lambda run: run.ranks_per_node,
    "ssh": lambda run: 1,
}
BINDING = ("--cpu-bind", "-bind-to", "--bind-to")  # of PALS and Hydra
SAFE_PATH = "PYTHONSAFEPATH"  # Python's own: `-m` does not import from the working folder
# The hub's libraries ask the network before they look beside them, and wait for its answer.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def exported(run: Run) -> dict[str, str]:
    """The variables of a job: the facility's, of its network's plugin, and of the hub's caches."""
    variables = dict(run.facility.environment)
    if run.facility.network.plugin is not None:
        variables["NCCL_NET_PLUGIN"] = str(run.facility.network.plugin)
    if run.facility.node_network is False:
        variables |= OFFLINE
    return variables | {name: str(path) for name, path in run.folders.caches.items()}


def atoll_command(run: Run) -> list[str]:
    """`atoll`, in the run's container or in the environment this process runs from."""
    prefix = container_prefix(run)
    return [*prefix, "python3" if prefix else sys.executable, "-m", "atoll"]


def _mpiexec(run: Run) -> list[str]:
    counts = ["-n", str(run.world_size), "--ppn", str(run.ranks_per_node)]
    return ["mpiexec", *counts, *run.facility.step, *run.facility.task_binding]


def _bound(run: Run) -> list[str]:
    """Tell a task of mpiexec that it has cores of its own: no variable of PMI says so."""
    words = [*run.facility.step, *run.facility.task_binding]
    for word, following in pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if option in BINDING and (value or following) != "none":
            return ["--bound"]
    return []


def _srun(run: Run) -> list[str]:
    """All of the step is stated here: srun inherits too little, and differently by version."""
    if run.facility.scheduler == "none":
        return []
    wanted = tasks(run)
    cores = [] if wanted.cores is None else [f"--cpus-per-task={wanted.cores}"]
    one_per_device = wanted.per_node == run.ranks_per_node
    return [
        "srun",
        f"--nodes={run.nodes}",
        f"--ntasks={run.nodes * wanted.per_node}",
        f"--ntasks-per-node={wanted.per_node}",
        *cores,
        "--kill-on-bad-exit=1",
        *run.facility.step,
        *(run.facility.task_binding if one_per_device else []),
    ]


def _launch(run: Run, run_folder: Path, start: str | None = None) -> list[str]:
    """`atoll launch`; `start` says how it starts the node's ranks, if it is not one itself."""
    facility = run.facility
    port = [] if facility.port is None else ["--port", str(facility.port)]
    suffix = [f"--address-suffix={facility.address_suffix}"] if facility.address_suffix else []
    folders = [f"--task-folder={name}={path}" for name, path in facility.task_folders.items()]
    ranks = [start, str(run.ranks_per_node)] if start else []
    return [*atoll_command(run), "launch", *port, *suffix, *folders, *ranks, str(run_folder)]
