"""Fixtures that all tests share, and pytest's hooks by which a run selects its tests."""

import signal
from collections.abc import Iterator

import pytest
from rank_pool import RankPool
from selection import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_terminal_summary,
)

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_terminal_summary",
    "ranks",
]


@pytest.fixture(scope="session", autouse=True)
def heed_interrupts() -> None:
    """In the background a shell has all processes ignore Ctrl-C, and so what the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
