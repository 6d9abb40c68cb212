"""Processes that answer in order, and end when they should."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from atoll.data.workers import ordered_map
from atoll.errors import UserError


def squarer(wait_for_even: float) -> Callable[[int], tuple[int, int, int]]:
    def square(number: int) -> tuple[int, int, int]:
        if number % 2 == 0:
            time.sleep(wait_for_even)
        return number * number, os.getpid(), threading.get_ident()

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


def test_results_come_in_the_order_of_the_jobs_from_all_workers() -> None:
    found = list(ordered_map(partial(squarer, 0.01), range(40), workers=6))
    assert [square for square, _, _ in found] == [number * number for number in range(40)]
    assert len({process for _, process, _ in found}) == 2
    assert len({(process, thread) for _, process, thread in found}) == 6
    assert os.getpid() not in {process for _, process, _ in found}


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
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(ordered_map(broken, range(9), workers=1))


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
