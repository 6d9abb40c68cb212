"""Ordered maps over standard pools, never far ahead of whoever takes the results.

Processes come from a fork server: a fresh interpreter that imports the work once and holds no
threads, so it may be forked whatever the caller does. A few threads work in each: the encoder lets
go of the interpreter's lock, and threads share one vocabulary in the processor's cache, where
processes would push each other's out. Each has a pipe, and a thread of the caller at its end.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from atoll.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
# Others go on while a long item holds the order up; no more results than these wait in memory.
ITEMS_PER_WORKER = 8
# More threads would wait for each other at the interpreter's lock and the vocabulary's.
WORKERS_PER_PROCESS = 4
PRELOADED = ["atoll.data.encode"]


class Worker(NamedTuple):
    """A thread of a process, and the pipe it answers on."""

    process: BaseProcess
    pipe: Any
    ending: threading.Lock  # of the process: one thread at a time may ask how it ended


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Yield the results of items in their order, with at most `ahead` items submitted."""
    remaining = iter(items)
    futures = deque(pool.submit(work, item) for item in islice(remaining, ahead))
    while futures:
        result = futures.popleft().result()
        futures.extend(pool.submit(work, item) for item in islice(remaining, 1))
        yield result


def ordered_map(
    start: Callable[[], Callable[[Item], Result]],
    items: Iterable[Item],
    workers: int,
    threads: int = 1,
) -> Generator[Result, None, None]:
    """Yield the result of each item in the order of the items, from threads of other processes.

    `start` runs once in each process and gives the function that does the work there; it, the
    items and the results must pickle. `threads` is how many threads the tokenizers library may
    use by itself. Raises what the work raises, and `UserError` where a process is killed; closing
    the iterator ends the processes.
    """
    team: list[Worker] = []
    callers = ThreadPoolExecutor(workers)
    free: SimpleQueue[Worker] = SimpleQueue()

    def work(item: Item) -> Any:
        worker = free.get()
        try:
            return _ask(worker, item)
        finally:
            free.put(worker)

    try:
        while len(team) < workers:
            team += _begin(min(WORKERS_PER_PROCESS, workers - len(team)), start, threads)
        for worker in team:
            free.put(worker)
        yield from in_order(callers, work, items, ITEMS_PER_WORKER * workers)
    finally:
        callers.shutdown(wait=False, cancel_futures=True)
        for process in {worker.process for worker in team}:
            process.kill()  # also in the middle of a long item: nothing is written there
            process.join()
        callers.shutdown()


def start_server() -> None:
    """Let the fork server import the work while the caller does something else."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def _begin(count: int, start: Callable[[], Any], threads: int) -> list[Worker]:
    """Start one process of `count` workers."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = zip(*(context.Pipe() for _ in range(count)), strict=True)
    process = context.Process(target=_serve, args=(theirs, start, threads), daemon=True)
    process.start()
    for pipe in theirs:
        pipe.close()
    ending = threading.Lock()
    return [Worker(process, pipe, ending) for pipe in ours]


def _ask(worker: Worker, item: Any) -> Any:
    try:
        worker.pipe.send(item)
        result, error, trace = worker.pipe.recv()
    except (EOFError, ConnectionError):
        with worker.ending:
            worker.process.join()
        raise UserError(
            f"a tokenising process ended early (exit code {worker.process.exitcode})",
            "memory most likely ran out: set data.workers lower, or run where there is more",
        ) from None
    if error is not None:
        raise error from RuntimeError(trace)
    return result


def _serve(pipes: tuple[Any, ...], start: Callable[[], Any], threads: int) -> None:
    """The life of one process: it ends with the pipes, and so with a caller that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C ends the caller, which ends its processes
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    work, *failure = _attempt(start)
    with ThreadPoolExecutor(len(pipes)) as team:
        for pipe in pipes:
            team.submit(_answer, pipe, work, failure)


def _answer(pipe: Any, work: Callable[[Any], Any], failure: list[Any]) -> None:
    with suppress(EOFError, ConnectionError):
        while True:
            item = pipe.recv()
            pipe.send((None, *failure) if failure[0] else _attempt(work, item))


def _attempt(action: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None, str]:
    """The result, or the error and its trace."""
    try:
        return action(*arguments), None, ""
    except Exception as error:
        return None, error, traceback.format_exc()
