"""`atoll launch`: put this task in its place and call its entrypoint, or start the node's ranks."""

import argparse
import importlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from atoll.commands import CommandParser, close_stdin
from atoll.errors import UserError, keep_failure
from atoll.imports import paused_garbage_collection
from atoll.launch.master import on_fabric
from atoll.launch.over_ssh import follow_stdin
from atoll.launch.placement import Placement
from atoll.launch.preload import preload
from atoll.launch.processes import run_processes
from atoll.launch.ranks import placement_from

DEFAULT_ENTRYPOINT = "atoll.train.train:main"

Entrypoint = Callable[[Path, Placement], int | None]


def main(argv: list[str]) -> int:
    """Launch an entrypoint on the ranks that are this process's to start; return its exit code.

    Raises UserError where the arguments or the environment contradict themselves.
    """
    arguments = _parse(argv)
    _check(arguments)
    if arguments.follow_stdin:
        follow_stdin()
    close_stdin()
    placement = placement_from(
        os.environ, socket.gethostname(), arguments.port, arguments.address_suffix
    )
    with with_port(placement) as placement:
        if arguments.local_ranks is not None:
            return _start_local_ranks(placement, arguments)
        if arguments.torchrun is not None:
            return _become_torchrun(placement, arguments)
        if arguments.fork is not None:
            return _fork_local_ranks(placement, arguments)
        return _call_in_place(placement, arguments)


def threads_per_rank(
    placement: Placement,
    core_count: int,
    node_cores: int,
    cpus_per_task: str | None = None,
    bound: bool = False,
) -> int:
    """Share the cores this process may use among the ranks that use the same ones.

    A Slurm step that was given `--cpus-per-task` has bound each task to cores of its own. So has
    an mpiexec that was told to (`bound`), where all ranks of the node find room beside each other.
    """
    ranks = placement.local_world_size
    if placement.source == "slurm" and cpus_per_task:
        return max(1, min(core_count, int(cpus_per_task)))
    if placement.source == "pals" and bound and core_count * ranks <= node_cores:
        return core_count
    return max(1, core_count // ranks)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        "launch", "Put this task in its place, or start this node's ranks of a run."
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument(
        "entrypoint",
        metavar="ENTRYPOINT",
        nargs="?",
        default=DEFAULT_ENTRYPOINT,
        help="module:function to call",
    )
    parser.add_argument("--port", type=int, help="port of rank 0 (default: made of the job id)")
    parser.add_argument(
        "--address-suffix", default="", metavar="S", help="added to the name of the first host"
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--local-ranks", type=int, metavar="N", help="start N ranks here")
    ranks.add_argument(
        "--fork", type=int, metavar="N", help="import once, then fork N ranks (one task per node)"
    )
    ranks.add_argument(
        "--torchrun", type=int, metavar="N", help="become torchrun for N ranks (one task per node)"
    )
    parser.add_argument(
        "--task-folder",
        action="append",
        default=[],
        metavar="VARIABLE=FOLDER",
        help="make a folder of this rank's own there, and name it in the variable",
    )
    parser.add_argument(
        "--bound", action="store_true", help="mpiexec has bound each task to cores of its own"
    )
    parser.add_argument(
        "--follow-stdin", action="store_true", help="signals come by stdin, and the end by its end"
    )
    return parser.read(argv)


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.run_folder.is_dir():
        raise UserError(
            f"no run folder {arguments.run_folder}", "give the folder that holds run.yaml"
        )
    if not re.fullmatch(r"[\w.]+:\w+", arguments.entrypoint):
        raise UserError(
            f"entrypoint {arguments.entrypoint!r}",
            f"write module:function, as {DEFAULT_ENTRYPOINT}",
        )
    for option in ("local_ranks", "fork", "torchrun"):
        count = getattr(arguments, option)
        if count is not None and count < 1:
            raise UserError(f"--{option.replace('_', '-')} {count}", "start at least 1 rank")


@contextmanager
def with_port(placement: Placement) -> Iterator[Placement]:
    """Give a lone launcher a free port, and hold it until its ranks are done.

    The holder is bound, not listening: nobody else is handed the port, while rank 0, which binds
    it with SO_REUSEADDR, is not in its way.
    """
    if placement.master_port:
        yield placement
        return
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield replace(placement, master_port=holder.getsockname()[1])


def _call_in_place(placement: Placement, arguments: argparse.Namespace) -> int:
    _enter(placement, arguments.task_folder, arguments.bound)
    with paused_garbage_collection():
        entrypoint = _function(_import(arguments.entrypoint), arguments.entrypoint)
    return int(entrypoint(arguments.run_folder, placement) or 0)


def _start_local_ranks(placement: Placement, arguments: argparse.Namespace) -> int:
    """Do what a scheduler does on one machine: start this command anew for each rank."""
    count = arguments.local_ranks
    if placement.world_size > 1:
        raise UserError(
            f"--local-ranks {count} in a task that is rank {placement.rank} of "
            f"{placement.world_size} already ({placement.source})",
            "leave --local-ranks out, or start one task only",
        )
    folders = [f"--task-folder={folder}" for folder in arguments.task_folder]
    words = [*folders, str(arguments.run_folder), arguments.entrypoint]
    return start_local_ranks(placement, count, ["launch", *words])


def start_local_ranks(placement: Placement, count: int, words: Sequence[str]) -> int:
    """Start a command of atoll anew for each rank, with the rank's place in its environment."""
    argv = [sys.executable, "-m", "atoll", *words]

    def work(local_rank: int) -> Callable[[], int]:
        environment = placement.local(local_rank, count, "local").environment()
        return lambda: os.execve(sys.executable, argv, {**os.environ, **environment})

    return run_processes([work(local_rank) for local_rank in range(count)])


def _fork_local_ranks(placement: Placement, arguments: argparse.Namespace) -> int:
    count = arguments.fork
    _check_one_task_per_node(placement, f"--fork {count}")
    entrypoint = _function(preload(lambda: _import(arguments.entrypoint)), arguments.entrypoint)

    def work(local_rank: int) -> Callable[[], int]:
        forked = placement.local(local_rank, count, "fork")
        return lambda: _call_forked(entrypoint, arguments, forked)

    return run_processes([work(local_rank) for local_rank in range(count)])


def _call_forked(
    entrypoint: Entrypoint, arguments: argparse.Namespace, placement: Placement
) -> int:
    threads_are_ours = "OMP_NUM_THREADS" not in os.environ
    _enter(placement, arguments.task_folder)
    if threads_are_ours:
        # torch read its thread count when it was imported, before this rank had one.
        torch = importlib.import_module("torch")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        return int(entrypoint(arguments.run_folder, placement) or 0)
    except UserError as error:
        keep_failure(error, arguments.run_folder)
        raise


def _become_torchrun(placement: Placement, arguments: argparse.Namespace) -> NoReturn:
    """Hand this node's ranks to the agent of torch, which calls `atoll launch` for each."""
    _check_one_task_per_node(placement, f"--torchrun {arguments.torchrun}")
    port, suffix = placement.master_port, arguments.address_suffix
    # torch does not know a machine by its name on a faster network
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    is_apart = suffix and placement.node_count > 1
    argv = [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={placement.node_count}",
        f"--nproc-per-node={arguments.torchrun}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={placement.master_address}:{port}",
        f"--rdzv-id={port}",
        f"--rdzv-conf=is_host={int(placement.node_rank == 0)}",
        *([f"--local-addr={on_fabric(name, suffix)}"] if is_apart else []),
        *("-m", "atoll", "launch"),
        *(f"--task-folder={folder}" for folder in arguments.task_folder),
        *(str(arguments.run_folder), arguments.entrypoint),
    ]
    os.execv(sys.executable, argv)


def _check_one_task_per_node(placement: Placement, option: str) -> None:
    if placement.world_size != placement.node_count:
        raise UserError(
            f"{option} with {placement.world_size} tasks on {placement.node_count} nodes "
            f"({placement.source})",
            "start one task per node: each starts the ranks of its node",
        )


def _make_task_folders(placement: Placement, task_folders: Sequence[str]) -> None:
    """Caches that many ranks must not share get a folder for each, and each makes its own.

    In one of the user's own: another user's ranks come to the same node.
    """
    for word in task_folders:
        variable, _, folder = word.partition("=")
        place = os.path.expandvars(folder)  # /lscratch/$SLURM_JOB_ID is there on the node alone
        private = Path(f"{Path(place)}-{os.getuid()}")
        own = private / f"{placement.master_port}-rank{placement.rank}"
        try:
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
            own.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make {own} for {variable}: {error.strerror}",
                f"fix facility.task_folders.{variable}: a folder of the node's own disk",
            ) from None
        os.environ[variable] = str(own)


def _enter(placement: Placement, task_folders: Sequence[str], bound: bool = False) -> None:
    """Put the placement where torch looks for it; nothing else writes the ranks' environment."""
    os.environ.update(placement.environment())
    _make_task_folders(placement, task_folders)
    own, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    cpus_per_task = os.environ.get("SLURM_CPUS_PER_TASK")
    threads = threads_per_rank(placement, own, all_cores, cpus_per_task, bound)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _import(entrypoint: str) -> ModuleType:
    name = entrypoint.partition(":")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the entrypoint's own module lacks is no slip of the command line.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"entrypoint {entrypoint!r}: no module {error.name}", "check its spelling"
        ) from None


def _function(module: ModuleType, entrypoint: str) -> Entrypoint:
    name = entrypoint.partition(":")[2]
    function: Entrypoint | None = getattr(module, name, None)
    if not callable(function):
        raise UserError(
            f"entrypoint {entrypoint!r}: {module.__name__} has no {name}", "check its spelling"
        )
    return function
