"""The endless order of samples of several sources, mixed by weights: its state is one integer.

A step has a grid of points in [0, 1), as many as it has samples, in an order that is keyed by
(seed, step); a source has the points of its own interval, as wide as its share. The grid of each
step is moved by the next number of the van der Corput sequence (1935), so that the points of 2^k
steps, too, are a grid. So each step has its share of every source within one sample, and how many
samples of a source stand before a position is counted without a look at them. Each source is read
in the order that a run on it alone has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from atoll.data.order import Ints, sample_ids
from atoll.data.samples import Samples
from atoll.run_dir import digest
from atoll.settings import Run

BITS = 32  # of a step's place in the van der Corput sequence


@dataclass(frozen=True)
class Phase:
    """Steps of one mixture.

    borders: the ends of the sources' intervals, from 0 to step_samples << BITS.
    """

    first_position: int
    key: int
    borders: tuple[int, ...]


@dataclass(frozen=True)
class Mixture:
    """Sources of so many samples each, which stand end to end; a step takes `step_samples`."""

    seed: int
    step_samples: int
    source_samples: tuple[int, ...]
    phases: tuple[Phase, ...]

    def ids(self, position: int, count: int) -> Ints:
        """The samples at positions position to position + count of the endless order."""
        sources = self.sources_at(position, count)
        before, size = self.consumed(position), np.cumsum((0, *self.source_samples))
        ids = np.empty(count, dtype=np.int64)
        for source, samples in enumerate(self.source_samples):
            places = np.flatnonzero(sources == source)
            own = sample_ids(self.seed, samples, before[source], len(places))
            ids[places] = size[source] + own
        return ids

    def sources_at(self, position: int, count: int) -> Ints:
        """The source of each of these positions."""
        parts = [np.zeros(0, dtype=np.int64)]
        for phase, first, behind in self._spans(position, position + count):
            parts.append(self._drawn(phase, first - phase.first_position, behind - first))
        return np.concatenate(parts)

    def consumed(self, position: int) -> list[int]:
        """How many samples of each source stand before a position."""
        totals = [0] * len(self.source_samples)
        for phase, first, behind in self._spans(0, position):
            steps, rest = divmod(behind - first, self.step_samples)
            below = [points_below(border, steps) for border in phase.borders]
            drawn = self._drawn(phase, steps * self.step_samples, rest)
            partly = np.bincount(drawn, minlength=len(totals))
            totals = [
                total + high - low + int(more)
                for total, (low, high), more in zip(totals, pairwise(below), partly, strict=True)
            ]
        return totals

    def epochs(self, position: int) -> list[float]:
        """How often each source was read through before a position."""
        consumed = self.consumed(position)
        return [n / samples for n, samples in zip(consumed, self.source_samples, strict=True)]

    def _spans(self, first: int, behind: int) -> list[tuple[Phase, int, int]]:
        """The phases that positions lie in, each with its part of them."""
        ends = [*(phase.first_position for phase in self.phases[1:]), behind]
        spans = (
            (phase, max(first, phase.first_position), min(behind, end))
            for phase, end in zip(self.phases, ends, strict=True)
        )
        return [span for span in spans if span[1] < span[2]]

    def _drawn(self, phase: Phase, place: int, count: int) -> Ints:
        """The sources of `count` positions from a place in a phase on."""
        steps = np.arange(place, place + count, dtype=np.int64) // self.step_samples
        cells = sample_ids(phase.key, self.step_samples, place, count)
        points = (cells << BITS) + van_der_corput(steps)
        return np.searchsorted(np.array(phase.borders[1:-1], dtype=np.int64), points, side="right")


def mixture(
    seed: int,
    step_samples: int,
    curriculum: Sequence[tuple[int, Sequence[float]]],
    useful_tokens: Sequence[int],
    source_samples: Sequence[int],
) -> Mixture:
    """The order of sources whose weights are shares of tokens.

    curriculum: from which step on each source has which weight. useful_tokens: of all samples of
    each source, which differ in how much of a sample is padding.
    """
    rates = [Fraction(n, tokens) for n, tokens in zip(source_samples, useful_tokens, strict=True)]
    phases = []
    for step, weights in curriculum:
        parts = [Fraction(w) * rate for w, rate in zip(weights, rates, strict=True)]
        ends = [sum(parts[:n], Fraction(0)) for n in range(len(parts) + 1)]
        points = step_samples << BITS
        borders = tuple(int(end / ends[-1] * points) for end in ends)
        key = int(digest(["mixture", seed, step], 15), 16)
        phases.append(Phase(step * step_samples, key, borders))
    return Mixture(seed, step_samples, tuple(source_samples), tuple(phases))


def mixture_of(samples: Samples, run: Run) -> Mixture:
    """The order of the training samples of all sources of a run; one text is a mixture of one."""
    return mixture(
        run.order_seed,
        run.training.global_batch_samples,
        run.data.curriculum or [(0, [1.0])],
        [int(samples.useful(ids).sum(dtype=np.int64)) for ids in samples.ids_of_sources],
        [len(ids) for ids in samples.ids_of_sources],
    )


def van_der_corput(numbers: Ints) -> Ints:
    """The bits of each number in reverse, as a fraction of 2^BITS."""
    reversed_bits = np.zeros_like(numbers)
    for bit in range(BITS):
        reversed_bits |= ((numbers >> bit) & 1) << (BITS - 1 - bit)
    return reversed_bits


def points_below(border: int, steps: int) -> int:
    """How many points of the first steps lie below a border.

    The steps are taken as blocks of 2^k, whose points of a cell are evenly spaced.
    """
    cells, inside = divmod(border, 1 << BITS)
    count, first = cells * steps, 0
    for bit in reversed(range(steps.bit_length())):
        if steps >> bit & 1:
            spacing = 1 << (BITS - bit)
            offset = int(f"{first:0{BITS}b}"[::-1], 2)
            count += min(1 << bit, max(0, -((offset - inside) // spacing)))
            first += 1 << bit
    return count
