"""The order of samples: a permutation each epoch, the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data.order import rank_share, sample_ids


@given(seed=st.integers(0, 2**70), count=st.integers(1, 700), epoch=st.integers(0, 2**40))
def test_each_epoch_visits_every_sample_once(seed: int, count: int, epoch: int) -> None:
    ids = sample_ids(seed, count, epoch * count, count)
    assert sorted(ids.tolist()) == list(range(count))


@given(seed=st.integers(0, 2**32), count=st.integers(20, 700))
def test_epochs_and_seeds_differ(seed: int, count: int) -> None:
    first = sample_ids(seed, count, 0, count)
    assert first.tolist() != sample_ids(seed, count, count, count).tolist()
    assert first.tolist() != sample_ids(seed + 1, count, 0, count).tolist()


@given(
    count=st.integers(1, 300), position=st.integers(0, 1000), cut=st.integers(0, 50),
    length=st.integers(50, 400),
)  # fmt: skip
def test_any_position_is_found_without_those_before_it(
    count: int, position: int, cut: int, length: int
) -> None:
    whole = sample_ids(7, count, position, length)
    parts = [
        sample_ids(7, count, position, cut),
        sample_ids(7, count, position + cut, length - cut),
    ]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_every_place_of_the_epoch_is_as_likely() -> None:
    count, epochs = 10, 4000
    ids = sample_ids(3, count, 0, count * epochs).reshape(epochs, count)
    seen = np.stack([np.bincount(ids[:, place], minlength=count) for place in range(count)])
    expected = epochs / count
    chi_squared = float(((seen - expected) ** 2 / expected).sum())
    # 81 degrees of freedom: mean 81, standard deviation 12.7.
    assert chi_squared < 81 + 5 * 12.7


def test_the_order_is_the_same_on_every_machine() -> None:
    # Fixed once and for all: another order would resume old checkpoints on other samples.
    expected = [3, 0, 2, 4, 6, 5, 7, 1, 5, 1, 6, 7, 4, 2, 0, 3]
    assert sample_ids(0, 8, 0, 16).tolist() == expected


@pytest.mark.parametrize(("world_size", "microbatch"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3)])
def test_ranks_together_hold_the_global_batch(world_size: int, microbatch: int) -> None:
    ids = sample_ids(0, 100, 30, 24)
    shares = [rank_share(ids, rank, world_size, microbatch) for rank in range(world_size)]
    assert {len(share) for share in shares} == {24 // (world_size * microbatch)}
    together = np.concatenate([part for share in shares for part in share])
    assert sorted(together.tolist()) == sorted(ids.tolist())
