"""The order of several sources: shares of each step, found at any position, for any curriculum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.mixture import BITS, Mixture, mixture, points_below, van_der_corput
from atoll.data.order import sample_ids

SIZES, TOKENS = [100, 99, 77, 2000], [10_000, 9_000, 5_000, 200_000]
CURRICULUM = [(0, [1, 0.5, 0.03, 0]), (10, [0.2, 1, 0, 1]), (50, [0, 0, 1, 0])]
STEP = 24


def mixed(curriculum: list[tuple[int, list[float]]] = CURRICULUM) -> Mixture:
    return mixture(7, STEP, curriculum, TOKENS, SIZES)


def counts(sources: np.ndarray) -> np.ndarray:
    return np.bincount(sources, minlength=len(SIZES))


def sample_shares(weights: list[float]) -> np.ndarray:
    """Of all samples, where weights are shares of tokens."""
    rates = np.array(weights) * SIZES / TOKENS
    return rates / rates.sum()


def test_every_step_and_every_power_of_two_of_steps_has_its_shares_within_one_sample() -> None:
    order = mixed([(0, [3, 1, 0.02, 0.5])])
    expected = sample_shares([3, 1, 0.02, 0.5])
    for steps in (1, 2, 4, 8, 16, 32, 64):
        for first in range(0, 128, steps):
            drawn = counts(order.sources_at(first * STEP, steps * STEP))
            assert np.abs(drawn - expected * steps * STEP).max() < 1 + 1e-6


def test_weights_are_shares_of_tokens() -> None:
    weights = [3, 1, 0.5, 2.0]
    drawn = counts(mixed([(0, weights)]).sources_at(0, 4096 * STEP))
    tokens = drawn * np.array(TOKENS) / SIZES
    assert tokens / tokens.sum() == pytest.approx(np.array(weights) / sum(weights), abs=1e-4)


def test_a_curriculum_changes_the_weights_with_its_steps() -> None:
    order = mixed()
    for first, behind, weights in ((0, 10, 0), (10, 50, 1), (50, 80, 2)):
        expected = sample_shares(CURRICULUM[weights][1])
        for step in range(first, behind):
            drawn = counts(order.sources_at(step * STEP, STEP))
            assert np.abs(drawn - expected * STEP).max() < 1 + 1e-6
            assert (drawn[expected == 0] == 0).all()


@settings(max_examples=20)
@given(first=st.integers(0, 100 * STEP), cut=st.integers(0, 60), count=st.integers(60, 90))
def test_any_position_is_found_without_those_before_it(first: int, cut: int, count: int) -> None:
    order = mixed()
    parts = [order.ids(first, cut), order.ids(first + cut, count - cut)]
    assert np.concatenate(parts).tolist() == order.ids(first, count).tolist()
    assert order.consumed(first) == counts(order.sources_at(0, first)).tolist()


def test_each_source_is_read_as_a_run_on_it_alone_reads_it() -> None:
    order = mixed()
    ids, sources = order.ids(0, 90 * STEP), order.sources_at(0, 90 * STEP)
    for source, size in enumerate(SIZES):
        own = ids[sources == source] - sum(SIZES[:source])
        assert own.tolist() == sample_ids(7, size, 0, len(own)).tolist()
    assert order.epochs(90 * STEP)[2] > 2, "it went through more than one epoch"
    alone = mixture(7, STEP, [(0, [0.3])], TOKENS[:1], SIZES[:1])
    assert alone.ids(5, 500).tolist() == sample_ids(7, SIZES[0], 5, 500).tolist()


@given(
    cells=st.integers(1, 9), steps=st.integers(0, 300), share=st.fractions(0, 1),
)  # fmt: skip
def test_points_are_counted_without_a_look_at_them(cells: int, steps: int, share) -> None:
    border = int(share * (cells << BITS))
    points = (np.arange(cells)[:, None] << BITS) + van_der_corput(np.arange(steps))[None]
    assert points_below(border, steps) == int((points < border).sum())


def test_the_order_is_the_same_on_every_machine() -> None:
    # Fixed once and for all: another order would resume old checkpoints on other samples.
    expected = [3, 11, 8, 10, 0, 12, 2, 4, 14, 6, 5, 7, 1, 13, 5, 1]
    order = mixture(0, 8, [(0, [1, 1]), (1, [3, 1])], [64, 64], [8, 8])
    assert order.ids(0, 16).tolist() == expected
    assert mixture(1, 8, [(0, [1, 1])], [64, 64], [8, 8]).ids(0, 8).tolist() != expected[:8]


def test_a_source_that_joins_later_leaves_the_order_before_it() -> None:
    alone = mixture(7, STEP, [(0, [1])], TOKENS[:1], SIZES[:1])
    both = mixture(7, STEP, [(0, [1, 0]), (9, [1, 2])], TOKENS[:2], SIZES[:2])
    assert both.ids(0, 9 * STEP).tolist() == alone.ids(0, 9 * STEP).tolist()
    later = both.ids(9 * STEP, 200)
    first = later[later < SIZES[0]]
    assert 0 < len(first) < 200
    assert first.tolist() == alone.ids(9 * STEP, len(first)).tolist()
