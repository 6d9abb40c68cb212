"""Which held-out samples are evaluated where not all of them are."""

import numpy as np
import pytest

from atoll.data.pack import pack
from atoll.train.evaluate import drawn_ids, shares


def packed_lengths() -> np.ndarray:
    """Useful tokens by document of best-fit samples: the longest documents come first."""
    lengths = np.random.default_rng(0).lognormal(3, 0.8, 2000).astype(np.int64).clip(2, 120)
    plan = pack(lengths, 128, "best_fit")
    starts = np.searchsorted(plan.sample_first_piece, np.arange(len(plan.piece_length)), "right")
    pieces = np.bincount(starts - 1, minlength=plan.samples)
    return plan.useful / pieces


@pytest.mark.parametrize("count", [32, 64])
def test_few_samples_stand_for_all_of_them(count: int) -> None:
    mean_length = packed_lengths()
    ids = drawn_ids(len(mean_length), count)
    assert mean_length[:count].mean() > 1.5 * mean_length.mean(), "the first are the longest"
    assert mean_length[ids].mean() == pytest.approx(mean_length.mean(), rel=0.25)


def test_a_draw_is_the_same_each_time_and_grows_with_its_number() -> None:
    few, more = drawn_ids(347, 16), drawn_ids(347, 64)
    assert len(set(few.tolist())) == 16 and set(few) < set(more)
    assert (np.diff(few) > 0).all(), "read in the order of the files"
    assert drawn_ids(347, None).tolist() == drawn_ids(347, 999).tolist() == list(range(347))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_a_draw(ranks: int) -> None:
    ids = drawn_ids(50, 17)
    parts = [np.concatenate(shares(ids, rank, ranks, 2)) for rank in range(ranks)]
    together = np.concatenate(parts)
    assert sorted(together[together >= 0]) == ids.tolist()
    assert len({len(part) for part in parts}) == 1, "each takes part in every pass"
