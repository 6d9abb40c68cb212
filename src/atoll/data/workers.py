"""An ordered map over processes that never outlive the one that asked.

Processes come from a fork server: a fresh interpreter that imports the work once and holds no
threads, so it may be forked whatever the caller does. A worker is a thread of such a process:
the encoder lets go of the interpreter's lock, and a few threads share one vocabulary in the
processor's cache. Each worker talks to the caller through a pipe of its own; when the caller ends,
even by SIGKILL, the pipes end and the processes with them.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from atoll.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")
Work = Callable[[Job], Result]
# More threads would wait for each other at the interpreter's lock and the vocabulary's.
WORKERS_PER_PROCESS = 4
# One job in hand and one waiting: a worker is never idle while its last answer is written.
JOBS_PER_WORKER = 2
ROUNDS_AHEAD = 8


class Worker(NamedTuple):
    process: BaseProcess
    pipe: Any


def ordered_map(
    start: Callable[[], Work[Job, Result]], jobs: Iterable[Job], workers: int, threads: int = 1
) -> Generator[Result, None, None]:
    """Yield the result of each job in the order of the jobs.

    `start` runs once in each process and gives the function that does the jobs there; it, the
    jobs and the results must pickle. `threads` is how many threads the tokenizers library may
    use by itself. Raises the `UserError` of a job, and `UserError` where a process is killed;
    closing the iterator ends the processes.
    """
    team: list[Worker] = []
    try:
        while len(team) < workers:
            team += _hire(min(WORKERS_PER_PROCESS, workers - len(team)), start, threads)
        yield from _in_order(team, jobs)
    finally:
        for worker in team:
            worker.pipe.close()
        for process in {worker.process for worker in team}:
            process.join(timeout=5)
            process.kill()
            process.join()


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def _hire(count: int, start: Callable[[], Any], threads: int) -> list[Worker]:
    """Start one process of `count` workers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.data.encode"])
    ours, theirs = zip(*(context.Pipe() for _ in range(count)), strict=True)
    process = context.Process(target=_serve, args=(theirs, start, threads), daemon=True)
    process.start()
    for pipe in theirs:
        pipe.close()
    return [Worker(process, pipe) for pipe in ours]


def _in_order(team: list[Worker], jobs: Iterable[Any]) -> Iterator[Any]:
    numbered = enumerate(jobs)
    given: dict[Any, list[int]] = {worker.pipe: [] for worker in team}
    by_pipe = {worker.pipe: worker for worker in team}
    ready: dict[int, Any] = {}
    following = 0
    while True:
        # Not further ahead than a few rounds, should one job take very long.
        if len(ready) < ROUNDS_AHEAD * len(team):
            _hand_out(given, numbered)
        busy = [pipe for pipe, numbers in given.items() if numbers]
        if not busy:
            return
        for pipe in connection.wait(busy):
            ready[given[pipe].pop(0)] = _receive(by_pipe[pipe])
        while following in ready:
            yield ready.pop(following)
            following += 1


def _hand_out(given: dict[Any, list[int]], numbered: Iterator[tuple[int, Any]]) -> None:
    for depth in range(JOBS_PER_WORKER):
        for pipe in given:
            if len(given[pipe]) > depth:
                continue
            number, job = next(numbered, (None, None))
            if number is None:
                return
            pipe.send(job)
            given[pipe].append(number)


def _receive(worker: Worker) -> Any:
    try:
        error, result = worker.pipe.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        raise UserError(
            f"a tokenising process ended early (exit code {worker.process.exitcode})",
            "memory most likely ran out: set data.workers lower, or run where there is more",
        ) from None
    if isinstance(error, UserError):
        raise error
    if error is not None:
        raise RuntimeError(f"in a tokenising process:\n{error}")
    return result


def _serve(pipes: tuple[Any, ...], start: Callable[[], Work[Any, Any]], threads: int) -> None:
    """The life of one process: begin, then answer on every pipe until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C ends the caller, and so the pipes
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    error, work = _attempt(start)
    if error is not None:
        for pipe in pipes:
            _quietly(pipe.send, (error, None))
        return
    team = [threading.Thread(target=_quietly, args=(_answer, pipe, work)) for pipe in pipes]
    for worker in team:
        worker.start()
    for worker in team:
        worker.join()


def _answer(pipe: Any, work: Work[Any, Any]) -> None:
    while True:
        pipe.send(_attempt(work, pipe.recv()))


def _quietly(action: Callable[..., None], *arguments: Any) -> None:
    """Do what ends with the pipe when the caller has gone."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        action(*arguments)


def _attempt(work: Callable[..., Any], *arguments: Any) -> tuple[UserError | str | None, Any]:
    """An error, or no error and the result."""
    try:
        return None, work(*arguments)
    except UserError as error:
        return error, None
    except Exception:
        return traceback.format_exc(), None
