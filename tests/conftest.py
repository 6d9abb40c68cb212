"""Fixtures shared by all tests, and how several processes share the tests."""

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool

TESTS = Path(__file__).parent
# One process has these, in this order: there is one testbed, and its jobs would be counted too.
IN_TURN = [TESTS / "testbed", TESTS / "train" / "test_traffic.py"]
LOCK = Path(tempfile.gettempdir()) / f"atoll-tests-{os.getuid()}.lock"

# Tests run beside each other and start jobs of many threads: one that waits must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, whose marks of groups pytest 9.2 ignores
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file stay together, and so do those that are in turn."""
    from xdist.scheduler import LoadFileScheduling

    class InTurn(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "in turn" if place(config.rootpath / file) < len(IN_TURN) else file

    return InTurn(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The testbed's tests begin first: they mostly wait, and others can fill that time."""
    items.sort(key=lambda item: place(item.path))


def place(file: Path) -> int:
    """Where a file stands in `IN_TURN`; its length for any other."""
    found = [number for number, path in enumerate(IN_TURN) if file.is_relative_to(path)]
    return found[0] if found else len(IN_TURN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Beside a test marked `alone` no other one of this user's runs."""
    alone = item.get_closest_marker("alone") is not None
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
