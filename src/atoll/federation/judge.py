"""Which of a round's updates are left out by what was measured of them.

Nobody can be made an outlier by others' smallness: an update is too long against the longer half of
those beside it that change the model at all, or against what was usual in earlier rounds, and short
ones say nothing about directions. Legend: K updates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from atoll.settings.federation import Rule

AGAINST = -0.1  # a cosine: who is opposed by one other alone is left out by nobody
KEPT_NORMS = 16  # of so many rounds the usual length is kept
TINY = 1e-6  # of the model's own length: an update so short says nothing of how long others may be
SILENT = 1e-2  # of the usual length: so short an update does not say that others do not grow
GROWTH = 2.0  # of the usual length in a round, on the word of one update alone


@dataclass(frozen=True)
class Measured:
    """Of the updates, in order: inner products of each pair, and values that are not finite."""

    gram_KK: Tensor
    not_finite: list[int]
    # their squared lengths to the last bit, whatever the processor; empty: the rule clips nobody
    squares: list[float] = field(default_factory=list)

    @property
    def norms(self) -> list[float]:
        return [math.sqrt(max(0.0, value)) for value in self.gram_KK.diagonal().tolist()]

    def only(self, places: list[int]) -> "Measured":
        gram_KK, not_finite = self.gram_KK[places][:, places], [self.not_finite[n] for n in places]
        return Measured(gram_KK, not_finite, [self.squares[n] for n in places if self.squares])


@dataclass(frozen=True)
class Bound:
    """What earlier rounds, and the model itself, say of how long an update may be."""

    before: Sequence[float] = ()  # the usual length of an update in each of the last rounds
    model_norm: Callable[[], float] = lambda: 0.0  # nobody knows

    def usual(self, norms: Sequence[float]) -> float:
        """The length that an update of this round is compared with.

        Of three or more the middle one, and never less than in earlier rounds; in a first round
        the upper of two middles. Of fewer nobody knows whom to believe: as long as in earlier
        rounds, in a first one as the longer, which is not longer than the model itself.
        """
        if not norms:
            return 0.0
        ordered = sorted(norms)
        lower, upper = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        if len(norms) > 2:
            return max(lower, _middle(self.before)) if self.before else upper
        if self.before:
            return _middle(self.before)
        return min(upper, self.model_norm() or upper) if upper > 0.0 else 0.0

    def of_those_that_learn(self, norms: Sequence[float]) -> float:
        """The usual length where somebody is longer: not of such as change next to nothing.

        Asked for then alone, since the model has to be read to know its length. Of a model of
        zeros, before its first round, nobody knows whose length is usual: nobody is too long.
        """
        usual, tiny = self.usual(norms), TINY * self.model_norm()
        if not (self.before or tiny):
            return max(norms)
        if usual > tiny:
            return usual
        others = replace(self, before=[norm for norm in self.before if norm > tiny])
        return max(usual, tiny, others.usual([norm for norm in norms if norm > tiny]))

    def after(self, norms: Sequence[float]) -> list[float]:
        """What the next round is to know: rounds in which nothing was learned say nothing.

        norms: of the updates that were taken. As updates grow, behind a warm-up, so does what is
        usual, whoever sends next to nothing beside them; it never shrinks, so that nobody can make
        others too long. In a first round one update alone says nothing: it may be too short.
        """
        usual = self.usual(norms)
        if not self.before:
            return [usual] if usual > 0.0 and len(norms) > 1 else []
        spoken = [norm for norm in norms if norm >= SILENT * usual]
        if len(spoken) > 2:
            usual = max(usual, self.usual(spoken))
        if len(spoken) == 2:  # both grew: one alone can say so of itself only
            usual = max(usual, min(spoken))
        if len(spoken) == 1:
            usual = max(usual, min(spoken[0], GROWTH * usual))
        return [*self.before, *([usual] if usual > 0.0 else [])][-KEPT_NORMS:]


def judge(measured: Measured, names: Sequence[str], rule: Rule, bound: Bound) -> dict[str, str]:
    """Facility -> why its update is left out: not finite, far too long, or the wrong way."""
    norms = measured.norms
    refused = {
        name: f"{count:,} values are not finite"
        for name, count in zip(names, measured.not_finite, strict=True)
        if count
    }
    places = [n for n, name in enumerate(names) if name not in refused]
    lengths = [norms[n] for n in places]
    usual = bound.usual(lengths)
    if max(lengths, default=0.0) > rule.max_norm_ratio * usual:
        usual = bound.of_those_that_learn(lengths)
    for n in places:
        if norms[n] > rule.max_norm_ratio * usual:
            refused[names[n]] = (
                f"its norm {norms[n]:.3g} is more than {rule.max_norm_ratio:g} times the "
                f"median {usual:.3g}"
            )
    least = usual / rule.max_norm_ratio
    places = [n for n in places if names[n] not in refused and norms[n] >= least > 0.0]
    if len(places) >= 2:
        for n, angle in _opposed(_directions(measured.only(places).gram_KK), rule).items():
            why = f"its cosine to the others, {angle:.2f}, is below {rule.min_cosine:g}"
            refused[names[places[n]]] = why
    return refused


def _opposed(gram_KK: Tensor, rule: Rule) -> dict[int, float]:
    """The update that points away from the others most, and its cosine; of two, both.

    Away also from the others but any one of them: else it may be that one which is wrong.
    """
    angles = cosines(gram_KK)
    if len(angles) == 2:  # nobody knows which
        return {n: angle for n, angle in enumerate(angles) if angle < rule.min_cosine}
    least = max(rule.min_cosine, AGAINST)
    wrong = {
        n: angle
        for n, angle in enumerate(angles)
        if angle < rule.min_cosine and _without_one(gram_KK, n) < least
    }
    return dict(sorted(wrong.items(), key=lambda item: item[1])[:1])


def _without_one(gram_KK: Tensor, n: int) -> float:
    """The highest cosine of an update to the sum of the others, where any one of them is not."""
    others = [k for k in range(len(gram_KK)) if k != n]
    among_KK, dots_K = gram_KK[others][:, others], gram_KK[n, others]
    squares_K = among_KK.sum() - 2 * among_KK.sum(dim=0) + among_KK.diagonal()
    length_K = (gram_KK[n, n] * squares_K).clamp_min(1e-18).sqrt()  # 0: they say nothing together
    return float(((dots_K.sum() - dots_K) / length_K).max())


def cosines(gram_KK: Tensor) -> list[float]:
    """Of each update to the sum of the others; 1 where there are no others."""
    cosine_K = []
    for n in range(len(gram_KK)):
        others = [k for k in range(len(gram_KK)) if k != n]
        dot = float(gram_KK[n, others].sum())
        length = math.sqrt(max(0.0, float(gram_KK[n, n] * gram_KK[others][:, others].sum())))
        cosine_K.append(dot / length if others and length > 0 else 1.0)
    return cosine_K


def _directions(gram_KK: Tensor) -> Tensor:
    """As if all were of one length: a long one does not speak for the others."""
    length_K = gram_KK.diagonal().clamp_min(1e-300).sqrt()
    return gram_KK / length_K[:, None] / length_K[None]


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
