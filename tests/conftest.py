"""Fixtures that all tests share, and pytest's hooks by which a run selects its tests."""

import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings
from rank_pool import RankPool, start_forkserver
from selection import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_terminal_summary,
)

from atoll.imports import paused_garbage_collection

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_terminal_summary",
    "ranks",
]

MANY_TESTS = 100

# a busy machine is no fault of the code: 200 ms for an example are not always enough
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests are collected with all that they import."""
    with paused_garbage_collection():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def heed_interrupts() -> None:
    """In the background a shell has all processes ignore Ctrl-C, and so what the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def forkserver(request: pytest.FixtureRequest) -> None:
    """Where many tests run, what their processes import is imported once."""
    if len(request.session.items) > MANY_TESTS:
        start_forkserver()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
