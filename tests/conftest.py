"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator

import pytest
from rank_pool import RankPool

# More processes than cores: threads that spin while they wait would hold the others up many times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
