"""Processes that answer in order, and end when they should."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from atoll.data.workers import ordered_map
from atoll.errors import UserError


def squarer(wait_for_even: float) -> Callable[[int], tuple[int, int]]:
    def square(number: int) -> tuple[int, int]:
        if number % 2 == 0:
            time.sleep(wait_for_even)
        return number * number, os.getpid()

    return square


def mistaken() -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == 3:
            raise UserError("three", "take four")
        return number

    return work


def broken() -> Callable[[int], int]:
    def work(number: int) -> int:
        return 1 // number

    return work


def suicidal() -> Callable[[int], int]:
    def work(number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    return work


def gatherer(folder: Path, workers: int) -> Callable[[int], int]:
    """Work that goes on only when so many threads have begun."""

    def work(number: int) -> int:
        (folder / f"{os.getpid()}-{threading.get_native_id()}").touch()
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < workers and time.monotonic() < deadline:
            time.sleep(0.01)
        if number % 2 == 0:
            time.sleep(0.01)
        return number * number

    return work


def test_results_come_in_the_order_of_the_jobs_from_all_workers(tmp_path: Path) -> None:
    found = list(ordered_map(partial(gatherer, tmp_path, 6), range(40), workers=6))
    assert found == [number * number for number in range(40)]
    workers = {path.name for path in tmp_path.iterdir()}
    processes = {int(worker.split("-")[0]) for worker in workers}
    assert (len(workers), len(processes)) == (6, 2)
    assert os.getpid() not in processes


def test_jobs_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []

    def jobs() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    results = ordered_map(partial(squarer, 0.0), jobs(), workers=2)
    next(results)
    assert len(taken) < 100
    results.close()


def test_a_mistake_of_the_user_is_handed_on() -> None:
    results = ordered_map(mistaken, range(9), workers=2)
    with pytest.raises(UserError, match="three"):
        list(results)


def test_an_error_of_our_own_comes_with_its_trace() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(ordered_map(broken, range(9), workers=1))
    assert "test_workers.py" in str(caught.value.__cause__), "the trace of the process"


def unable() -> Callable[[int], int]:
    raise UserError("no tokenizer", "make one")


def test_a_mistake_found_at_the_start_is_handed_on() -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        list(ordered_map(unable, range(9), workers=2))


def test_a_killed_process_is_noticed() -> None:
    with pytest.raises(UserError, match="exit code -9"):
        list(ordered_map(suicidal, range(9), workers=2))


def test_closing_ends_the_processes() -> None:
    results = ordered_map(partial(squarer, 0.0), range(1000), workers=2)
    processes = {next(results)[1] for _ in range(20)}
    results.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
