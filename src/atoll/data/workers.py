"""Ordered maps over standard pools, never far ahead of whoever takes the results.

Processes come from a fork server: a fresh interpreter that imports the work once and holds no
threads, so it may be forked whatever the caller does.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from atoll.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
# Others go on while a long item holds the order up; no more results than these wait in memory.
ITEMS_PER_WORKER = 8
SECONDS_TO_END = 5
PRELOADED = ["atoll.data.encode", "concurrent.futures.process"]
# What makes the work of this process, and the work once it is made: a pool's processes can keep
# things from one item to the next only here.
_process: dict[str, Any] = {}


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
    """Yield the result of each item in the order of the items, from a pool of processes.

    `start` runs once in each process and gives the function that does the work there; it, the
    items and the results must pickle. `threads` is how many threads the tokenizers library may
    use by itself. Raises what the work raises, and `UserError` where a process is killed; closing
    the iterator ends the processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pool = ProcessPoolExecutor(workers, context, _begin, (start, threads))
    try:
        yield from in_order(pool, _work, items, ITEMS_PER_WORKER * workers)
    except BrokenProcessPool:
        processes = _processes(pool)
        pool.shutdown()
        # The pool itself has ended the others by SIGTERM.
        codes = [code for process in processes if (code := process.exitcode) != -signal.SIGTERM]
        raise UserError(
            f"a tokenising process ended early (exit code {codes[0] if codes else 'unknown'})",
            "memory most likely ran out: set data.workers lower, or run where there is more",
        ) from None
    finally:
        processes = _processes(pool)
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(SECONDS_TO_END)
            process.kill()
            process.join()


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def _processes(pool: ProcessPoolExecutor) -> list[Any]:
    """The pool's processes: it has no public way to tell how one ended, or to end a long item."""
    return list((pool._processes or {}).values())


def _begin(start: Callable[[], Any], threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C ends the caller, which ends its pool
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    _process["start"] = start
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    """A pool's process would wait for ever for a caller that was killed."""
    caller = multiprocessing.parent_process()
    assert caller is not None, "this is a pool's process"
    caller.join()
    os._exit(1)


def _work(item: Any) -> Any:
    if "work" not in _process:  # not in `_begin`, from which an error would not reach the caller
        _process["work"] = _process["start"]()
    return _process["work"](item)
