"""Fixtures shared by all tests, and how several processes share the tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool

TESTBED = Path(__file__).parent / "testbed"

# Tests run beside each other and start jobs of many threads: one that waits must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, whose marks of groups pytest 9.2 ignores
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests are one process's, and so are all of the testbed: there is one of it."""
    from xdist.scheduler import LoadFileScheduling

    class OneTestbed(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = TESTBED.relative_to(config.rootpath).as_posix()
            return folder if nodeid.startswith(f"{folder}/") else super()._split_scope(nodeid)

    return OneTestbed(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The testbed's tests begin first: they mostly wait, and others can fill that time."""
    items.sort(key=lambda item: TESTBED not in item.path.parents)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
