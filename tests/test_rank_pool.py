"""The pool of ranks goes on behind a test that ends one of them."""

import os

import pytest
from rank_pool import RankPool

from atoll.sharding.process_group import World


def rank_of(world: World) -> int:
    return world.rank


def end_of_a_rank(world: World) -> None:
    if world.rank == 0:
        os._exit(3)


def test_a_dead_rank_is_one_tests_failure_only(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="rank 0 died, exit code 3"):
        ranks.run(end_of_a_rank, world=2)
    assert ranks.run(rank_of, world=2) == [0, 1]
