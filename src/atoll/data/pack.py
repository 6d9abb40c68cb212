"""How documents fill samples of a fixed number of tokens.

A plan says, for each sample, which pieces of the token stream it is made of. It depends on the
lengths of the documents alone, so every rank makes the same one. Best-fit packing follows Ding
et al. 2024, "Fewer truncations improve language modeling".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Packing = Literal["best_fit", "concat", "padding", "pairs"]


@dataclass(frozen=True)
class PackingPlan:
    """Pieces in the order of their samples.

    Sample s is made of the pieces sample_first_piece[s] to sample_first_piece[s + 1]; piece p is
    the piece_length[p] tokens of the stream that begin at piece_start[p].
    """

    sequence_tokens: int
    piece_start: Ints
    piece_length: npt.NDArray[np.int32]
    sample_first_piece: Ints

    @property
    def samples(self) -> int:
        return len(self.sample_first_piece) - 1

    @property
    def useful(self) -> npt.NDArray[np.int32]:
        """Tokens of each sample that are not padding."""
        ends = np.concatenate([[0], np.cumsum(self.piece_length, dtype=np.int64)])
        return np.diff(ends[self.sample_first_piece]).astype(np.int32)

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """Tokens of each sample that are predicted: all of a piece but its first."""
        pieces = np.diff(self.sample_first_piece)
        return (self.useful - pieces).astype(np.int32)

    @property
    def padding_fraction(self) -> float:
        """The share of all slots that hold padding."""
        slots = self.samples * self.sequence_tokens
        return 1.0 - float(self.useful.sum(dtype=np.int64)) / slots


def joined(plans: Sequence[PackingPlan], stream_tokens: Sequence[int]) -> PackingPlan:
    """One plan for token streams of these lengths that stand end to end, each packed by its own."""
    if len(plans) == 1:
        return plans[0]
    streams = np.cumsum([0, *stream_tokens])
    pieces = np.cumsum([0, *(len(plan.piece_start) for plan in plans)])
    first = [
        plan.sample_first_piece[:-1] + before for plan, before in zip(plans, pieces, strict=False)
    ]
    return PackingPlan(
        plans[0].sequence_tokens,
        np.concatenate([p.piece_start + t for p, t in zip(plans, streams, strict=False)]),
        np.concatenate([plan.piece_length for plan in plans]),
        np.concatenate([*first, pieces[-1:]]),
    )


def pack(document_tokens: Ints, sequence_tokens: int, packing: Packing) -> PackingPlan:
    """Plan samples for documents that stand end to end in a token stream.

    document_tokens: the length of each document; none is zero.
    """
    assert len(document_tokens) > 0, "no documents to pack"
    assert int(document_tokens.min()) > 0, "a document without tokens"
    plans = {"best_fit": _best_fit, "concat": _concat, "padding": _padding, "pairs": _pairs}
    return plans[packing](document_tokens, sequence_tokens)


def _concat(document_tokens: Ints, sequence_tokens: int) -> PackingPlan:
    """Chop the stream into full samples; a document ends where it ends or where a sample does."""
    document_ends = np.cumsum(document_tokens)
    total = int(document_ends[-1])
    sample_starts = np.arange(0, total, sequence_tokens)
    # Two sorted runs: a stable sort merges them in one pass.
    borders = np.sort(np.concatenate([sample_starts, document_ends]), kind="stable")
    borders = borders[np.diff(borders, prepend=-1) > 0]
    starts, lengths = borders[:-1], np.diff(borders)
    first_piece = np.searchsorted(starts, sample_starts)
    return _plan(sequence_tokens, starts, lengths, np.append(first_piece, len(starts)))


def _padding(document_tokens: Ints, sequence_tokens: int) -> PackingPlan:
    """One document a sample, truncated at its end."""
    starts = np.cumsum(document_tokens) - document_tokens
    lengths = np.minimum(document_tokens, sequence_tokens)
    return _plan(sequence_tokens, starts, lengths, np.arange(len(starts) + 1))


def _pairs(document_tokens: Ints, sequence_tokens: int) -> PackingPlan:
    """Two documents a sample, which were made to fit it."""
    starts = np.cumsum(document_tokens) - document_tokens
    first_piece = np.arange(0, len(starts) + 1, 2)
    assert len(starts) % 2 == 0, "a document without its pair"
    return _plan(sequence_tokens, starts, document_tokens, first_piece)


def _best_fit(document_tokens: Ints, sequence_tokens: int) -> PackingPlan:
    """Put each piece, longest first, into the fullest sample that still has room for it."""
    starts, lengths = _pieces(document_tokens, sequence_tokens)
    sample = _fullest_fitting(lengths, sequence_tokens)
    order = np.argsort(sample, kind="stable")
    first_piece = np.searchsorted(sample[order], np.arange(int(sample.max()) + 2))
    return _plan(sequence_tokens, starts[order], lengths[order], first_piece)


def _pieces(document_tokens: Ints, sequence_tokens: int) -> tuple[Ints, Ints]:
    """Cut documents longer than a sample: full pieces, then the rest."""
    counts = -(-document_tokens // sequence_tokens)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = number * sequence_tokens
    starts = (np.cumsum(document_tokens) - document_tokens)[document] + begin
    return starts, np.minimum(document_tokens[document] - begin, sequence_tokens)


def _fullest_fitting(lengths: Ints, sequence_tokens: int) -> Ints:
    """The sample of each piece, by best-fit-decreasing.

    Pieces of one length are placed together. A sample that has taken one of them is fuller than
    before, so it is the best fit for the next as long as it has room: with room r for pieces of n
    tokens it takes r // n of them. All samples of equal room are then filled in one operation.
    """
    sample = np.empty(len(lengths), dtype=np.int64)
    # Narrow integers are sorted by counting.
    narrow = np.uint16 if sequence_tokens < 1 << 16 else np.int64
    order = np.argsort((sequence_tokens - lengths).astype(narrow), kind="stable")
    borders = np.flatnonzero(np.diff(lengths[order])) + 1
    # Samples by the room they have left; bit r of `open_rooms` says that there are some with r.
    by_room: list[list[Ints]] = [[] for _ in range(sequence_tokens + 1)]
    open_rooms, opened = 0, 0
    for pieces in np.split(order, borders):
        n = int(lengths[pieces[0]])
        while len(pieces):
            fitting = open_rooms >> n
            if fitting:
                room = n + (fitting & -fitting).bit_length() - 1
                samples = np.concatenate(by_room[room])
            else:
                room = sequence_tokens
                samples = opened + np.arange(-(-len(pieces) // (room // n)))
                opened += len(samples)
            each = room // n
            used = min(len(samples), -(-len(pieces) // each))
            taken = min(len(pieces), used * each)
            sample[pieces[:taken]] = np.repeat(samples[:used], each)[:taken]
            last = taken - (used - 1) * each
            rooms = [(room, samples[used:]), (room - each * n, samples[: used - 1])]
            rooms.append((room - last * n, samples[used - 1 : used]))
            by_room[room] = []
            open_rooms &= ~(1 << room)
            for room_now, with_it in rooms:
                if room_now and len(with_it):
                    by_room[room_now].append(with_it)
                    open_rooms |= 1 << room_now
            pieces = pieces[taken:]
    return sample


def _plan(sequence_tokens: int, starts: Ints, lengths: Ints, first_piece: Ints) -> PackingPlan:
    return PackingPlan(
        sequence_tokens, starts, lengths.astype(np.int32), first_piece.astype(np.int64)
    )
