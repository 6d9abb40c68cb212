"""An ordered map over processes that never outlive the one that asked.

Processes come from a fork server: a fresh interpreter that imports the work once and holds no
threads, so it may be forked whatever the caller does. Each process talks to the caller through
one pipe; when the caller ends, even by SIGKILL, the pipe ends and the process with it.
"""

import multiprocessing
import os
import signal
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
    use in each process. Raises the `UserError` of a job, and `UserError` where a process is
    killed; closing the iterator ends the processes.
    """
    team = [_hire(start, threads) for _ in range(workers)]
    try:
        yield from _in_order(team, jobs)
    finally:
        for worker in team:
            worker.pipe.close()
        for worker in team:
            worker.process.join(timeout=5)
            worker.process.kill()
            worker.process.join()


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def _hire(start: Callable[[], Any], threads: int) -> Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.data.encode"])
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, start, threads), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, mine)


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
            ready[given[pipe].pop(0)] = _answer(by_pipe[pipe])
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


def _answer(worker: Worker) -> Any:
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


def _serve(pipe: Any, start: Callable[[], Work[Any, Any]], threads: int) -> None:
    """The life of one process: begin, then answer until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C ends the caller, and so the pipe
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            work = start()
            while True:
                pipe.send((None, work(pipe.recv())))
        except UserError as error:
            pipe.send((error, None))
        except (EOFError, OSError):
            raise
        except Exception:
            pipe.send((traceback.format_exc(), None))
