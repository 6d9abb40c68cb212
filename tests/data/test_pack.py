"""Packing: every token in exactly one place, in samples that are full."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data.pack import Packing, PackingPlan, pack

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)
SEQUENCE = st.integers(2, 40)


def spans(plan: PackingPlan) -> np.ndarray:
    """Start and end of each piece, in the order of the stream."""
    ends = plan.piece_start + plan.piece_length
    order = np.argsort(plan.piece_start)
    return np.stack([plan.piece_start, ends], axis=1)[order]


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@given(lengths=LENGTHS, sequence=SEQUENCE)
def test_every_token_is_in_exactly_one_piece(
    packing: Packing, lengths: list[int], sequence: int
) -> None:
    found = spans(pack(np.array(lengths), sequence, packing))
    assert found[0, 0] == 0
    assert found[-1, 1] == sum(lengths)
    assert (found[1:, 0] == found[:-1, 1]).all()


@pytest.mark.parametrize("packing", ["best_fit", "concat", "padding"])
@given(lengths=LENGTHS, sequence=SEQUENCE)
def test_pieces_stay_in_their_document_and_samples_in_their_length(
    packing: Packing, lengths: list[int], sequence: int
) -> None:
    plan = pack(np.array(lengths), sequence, packing)
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, plan.piece_start, side="right")
    assert (plan.piece_start + plan.piece_length <= ends[document]).all()
    assert plan.piece_length.min() > 0
    assert plan.useful.max() <= sequence
    assert plan.useful.min() > 0


@pytest.mark.parametrize("packing", ["best_fit", "concat", "padding"])
@given(lengths=LENGTHS, sequence=SEQUENCE)
def test_counts_agree_with_the_pieces(packing: Packing, lengths: list[int], sequence: int) -> None:
    plan = pack(np.array(lengths), sequence, packing)
    first = plan.sample_first_piece
    of_sample = [plan.piece_length[a:b] for a, b in itertools.pairwise(first)]
    assert plan.useful.tolist() == [int(pieces.sum()) for pieces in of_sample]
    assert plan.targets.tolist() == [int((pieces - 1).sum()) for pieces in of_sample]


@given(lengths=LENGTHS, sequence=SEQUENCE)
def test_best_fit_cuts_a_document_only_where_it_must(lengths: list[int], sequence: int) -> None:
    plan = pack(np.array(lengths), sequence, "best_fit")
    assert len(plan.piece_start) == sum(-(-length // sequence) for length in lengths)


@given(lengths=LENGTHS, sequence=SEQUENCE)
def test_best_fit_is_the_textbook_algorithm(lengths: list[int], sequence: int) -> None:
    pieces = [sequence] * sum(n // sequence for n in lengths)
    pieces += sorted((n % sequence for n in lengths if n % sequence), reverse=True)
    rooms: list[int] = []
    for piece in pieces:
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else sequence) - piece)
    plan = pack(np.array(lengths), sequence, "best_fit")
    assert sorted(sequence - plan.useful) == sorted(rooms)


@given(lengths=LENGTHS, sequence=SEQUENCE)
def test_concat_pads_the_last_sample_alone(lengths: list[int], sequence: int) -> None:
    plan = pack(np.array(lengths), sequence, "concat")
    assert plan.samples == -(-sum(lengths) // sequence)
    assert (plan.useful[:-1] == sequence).all()


def test_padding_gives_each_document_a_sample_and_truncates_it() -> None:
    plan = pack(np.array([3, 9, 5]), 5, "padding")
    assert plan.piece_start.tolist() == [0, 3, 12]
    assert plan.useful.tolist() == [3, 5, 5]
    assert plan.targets.tolist() == [2, 4, 4]
    assert plan.padding_fraction == pytest.approx(2 / 15)


def test_two_documents_a_sample_where_they_are_pairs() -> None:
    plan = pack(np.array([3, 1, 4, 2]), 8, "pairs")
    assert plan.piece_start.tolist() == [0, 3, 4, 8]
    assert plan.piece_length.tolist() == [3, 1, 4, 2]
    assert plan.sample_first_piece.tolist() == [0, 2, 4]
    with pytest.raises(AssertionError, match="without its pair"):
        pack(np.array([3, 1, 4]), 8, "pairs")


def test_best_fit_fills_documents_of_many_lengths_almost_without_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(6.0, 1.0, 50_000).astype(np.int64) + 1
    assert pack(lengths, 2048, "best_fit").padding_fraction < 1e-3


def test_sequences_too_long_for_narrow_sorting() -> None:
    lengths = np.array([70_000, 100_001, 30_000])
    plan = pack(lengths, 100_000, "best_fit")
    assert sorted(plan.useful.tolist()) == [1, 100_000, 100_000]
    # 16 bits would take the room beside the shortest for 4,464 and place it first
    plan = pack(np.array([60_000, 40_000, 30_000]), 100_000, "best_fit")
    assert plan.useful.tolist() == [100_000, 30_000]


@pytest.mark.parametrize(("lengths", "reason"), [([], "no documents"), ([3, 0], "without tokens")])
def test_nothing_to_pack_is_our_own_mistake(lengths: list[int], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        pack(np.array(lengths, dtype=np.int64), 8, "best_fit")


def test_concat_s_pieces_end_where_a_document_or_a_sample_does() -> None:
    plan = pack(np.array([3, 5, 8]), 4, "concat")
    assert plan.piece_start.tolist() == [0, 3, 4, 8, 12]
    assert plan.piece_length.tolist() == [3, 1, 4, 4, 4]
    assert plan.sample_first_piece.tolist() == [0, 2, 3, 4, 5]


def test_best_fit_s_pieces_are_in_the_order_of_their_samples() -> None:
    plan = pack(np.array([3, 10, 1, 2]), 4, "best_fit")
    assert plan.sequence_tokens == 4
    assert plan.samples == len(plan.useful) == 4
    assert plan.useful.tolist() == [4, 4, 4, 4]
    assert sorted(zip(plan.piece_start, plan.piece_length, strict=True)) == [
        *((0, 3), (3, 4), (7, 4), (11, 2), (13, 1), (14, 2)),
    ]
    assert plan.padding_fraction == 0.0
    assert {plan.useful.dtype, plan.targets.dtype, plan.piece_length.dtype} == {np.dtype(np.int32)}
