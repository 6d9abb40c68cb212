"""Worker processes shared by all tests: four gloo ranks that import torch once.

A test sends a module-level function; it runs on ranks 0..world-1 as `function(world, *args)`
inside a process group of its own, and its results come back in order of rank.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

RANKS = 4
PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "transformers",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "opt", "bert")),
    "atoll.train.train",
    "deepspeed.module_inject",
    "deepspeed.runtime.engine",
    "networkx",
    "torch._inductor.compile_fx",
]
TIMEOUT_SECONDS = 180.0
# Some of what a test makes keeps its process groups, and each gloo group has threads that wake up a
# hundred times a second: beyond this many a worker makes room for a fresh one.
MOST_THREADS = 48
_started = False


def start_forkserver() -> None:
    """The one that ranks and the tokenizer's workers come from, with what all of them import."""
    global _started
    if _started:
        return
    _started = True
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for one when imported
    # the tokenizer's workers, in tests before, may have started one without these modules
    forkserver._forkserver._stop()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, "rank_pool"])
    forkserver.ensure_running()


class RankPool:
    def __init__(self) -> None:
        start_forkserver()
        self.context = multiprocessing.get_context("forkserver")
        self.pipes: list[Any] = [None] * RANKS
        self.processes: list[Any] = [None] * RANKS
        for rank in range(RANKS):
            self._start(rank)

    def _start(self, rank: int) -> None:
        self.pipes[rank], theirs = self.context.Pipe()
        self.processes[rank] = self.context.Process(target=_serve, args=(theirs,), daemon=True)
        self.processes[rank].start()
        theirs.close()

    def run(self, function: Callable[..., Any], *args: Any, world: int = RANKS) -> list[Any]:
        """The result of every rank; the first rank's exception is raised with its own text."""
        port = free_port()
        for rank in range(world):
            self.pipes[rank].send((function, args, rank, world, port))
        try:
            answers = [self._answer(rank) for rank in range(world)]
        except AssertionError:
            self._restart()  # for the tests to come
            raise
        if max(threads for *_, threads in answers) > MOST_THREADS:
            self._restart()
        failures = [f"rank {r}: {text}" for r, (_, text, _) in enumerate(answers) if text]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for result, *_ in answers]

    def _answer(self, rank: int) -> Any:
        if not self.pipes[rank].poll(TIMEOUT_SECONDS):
            raise AssertionError(f"rank {rank} gave no answer in {TIMEOUT_SECONDS} s")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            raise AssertionError(f"rank {rank} died, exit code {code}") from None

    def _restart(self) -> None:
        """All of them: libraries remember groups, and ranks must remember the same."""
        self.close()
        for rank in range(RANKS):
            self._start(rank)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, size, port = pipe.recv()
        except EOFError:
            return
        try:
            answer = (_in_group(function, args, rank, size, port), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        pipe.send((*answer, len(os.listdir("/proc/self/task"))))


def _in_group(function: Any, args: Any, rank: int, size: int, port: int) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from atoll.sharding.process_group import World, talking
    from atoll.sharding.tree import join

    device = torch.device("cpu")
    if size == 1:
        return function(World(0, 1, device), *args)
    timeout = timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, size, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        trees = join(store, rank, size, "127.0.0.1", timeout.total_seconds(), count=3)
        with talking(trees, device) as world:
            return function(world, *args)
    finally:
        dist.destroy_process_group()
        _forget_groups()


def _forget_groups() -> None:
    """DTensor remembers meshes for the life of a process; ours see one world after another."""
    from torch.distributed.tensor import debug

    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()
    if "deepspeed" in sys.modules:
        _forget_groups_of_deepspeed()


def _forget_groups_of_deepspeed() -> None:
    """It keeps groups in its modules, as a process of its own may."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups
    from torch.distributed import ProcessGroup

    comm.cdb = None
    for name, value in list(vars(groups).items()):
        if isinstance(value, ProcessGroup):
            setattr(groups, name, None)
        elif isinstance(value, dict) and not name.startswith("__"):
            value.clear()
