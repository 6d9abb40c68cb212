"""How the updates of facilities become one: weights, and rules that look at each value alone.

Legend: K updates, N values of a stretch, C of them. A new rule is one function and one line in its
table.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from atoll.errors import UserError
from atoll.settings.exchange import UpdateManifest
from atoll.settings.federation import Rule

CACHED = 1 << 16  # values whose sums in fp64 stay in a processor's cache, in not too many calls
Weigh = Callable[[list[UpdateManifest], Rule], list[float]]
Combine = Callable[[Tensor, Tensor, Rule], Tensor]


def by_tokens(manifests: list[UpdateManifest], rule: Rule) -> list[float]:
    return [float(manifest.tokens) for manifest in manifests]


def by_steps(manifests: list[UpdateManifest], rule: Rule) -> list[float]:
    return [float(manifest.steps) for manifest in manifests]


def equally(manifests: list[UpdateManifest], rule: Rule) -> list[float]:
    return [1.0 for _ in manifests]


def capped(shares: list[float], cap: float) -> list[float]:
    """Nobody has more than `cap` of the whole; the rest goes to the others.

    Of fewer than the cap needs, as where a facility is missing, all have the same.
    """
    cap = max(cap, 1.0 / len(shares))
    for _ in shares:
        over = [share > cap + 1e-12 for share in shares]
        if not any(over):
            break
        fixed = [share >= cap - 1e-12 for share in shares]
        free = 1.0 - cap * sum(fixed)
        rest = sum(share for share, is_fixed in zip(shares, fixed, strict=True) if not is_fixed)
        shares = [
            cap if is_fixed else share * free / rest
            for share, is_fixed in zip(shares, fixed, strict=True)
        ]
    return shares


WEIGH: dict[str, Weigh] = {
    "tokens": by_tokens,
    "steps": by_steps,
    "equal": equally,
    "capped": by_tokens,  # and nobody over the cap
}


def weights_of(manifests: list[UpdateManifest], rounds_late: list[int], rule: Rule) -> list[float]:
    """The share of each update, less for late work; they add up to one.

    What is late is less before the cap: else who is in time has more than it.
    """
    claims = WEIGH[rule.weigh](manifests, rule)
    pairs = zip(claims, _lateness(rounds_late, rule), strict=True)
    return _shared([claim * factor for claim, factor in pairs], rule)


def late_shares_of(
    manifests: list[UpdateManifest], rounds_late: list[int], rule: Rule, before: list[float]
) -> list[float]:
    """What late updates had in time, less for being late, beside others that were averaged.

    before: the claims of those others.
    """
    shares = _shared([*before, *WEIGH[rule.weigh](manifests, rule)], rule)[len(before) :]
    pairs = zip(shares, _lateness(rounds_late, rule), strict=True)
    return [share * factor for share, factor in pairs]


def _shared(claims: list[float], rule: Rule) -> list[float]:
    shares = _normalised(claims)
    return capped(shares, rule.cap) if rule.weigh == "capped" else shares


def _lateness(rounds_late: list[int], rule: Rule) -> list[float]:
    """FedAsync's factor of each; never 0, so that there is something to share out."""
    return [max(1e-200, float((1 + late) ** -rule.staleness_exponent)) for late in rounds_late]


def mean(values_KN: Tensor, weights_K: Tensor, rule: Rule) -> Tensor:
    """In the order of the updates, so that a repeated sum has the same bits; rounded once."""
    mean_N = torch.empty(values_KN.shape[1])
    sums_C, own_C = torch.empty(2, min(CACHED, len(mean_N)), dtype=torch.float64)
    for first in range(0, len(mean_N), CACHED):
        part_KC = values_KN[:, first : first + CACHED]
        total_C, weighed_C = sums_C[: part_KC.shape[1]], own_C[: part_KC.shape[1]]
        total_C.copy_(part_KC[0]).mul_(weights_K[0])
        for values_C, weight in zip(part_KC[1:], weights_K[1:], strict=True):
            total_C.add_(weighed_C.copy_(values_C).mul_(weight))
        mean_N[first : first + CACHED] = total_C
    return mean_N


def median(values_KN: Tensor, weights_K: Tensor, rule: Rule) -> Tensor:
    """Of each coordinate, the mean of the middle two where there is no middle (Yin et al. 2018)."""
    ordered = values_KN.sort(dim=0).values
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def trimmed_mean(values_KN: Tensor, weights_K: Tensor, rule: Rule) -> Tensor:
    """Without the `rule.trim` largest and smallest of each coordinate (Yin et al. 2018)."""
    ordered = values_KN.sort(dim=0).values
    return ordered[rule.trim : len(ordered) - rule.trim].mean(dim=0)


# krum chooses one update by the distances between all; the stretch is then that one's
COMBINE: dict[str, Combine] = {
    "mean": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": mean,
}


def refuse_too_few(count: int, rule: Rule) -> None:
    """Rules that bear f bad updates need enough good ones beside them."""
    if count < (least := rule.least_updates):
        raise UserError(
            f"combine={rule.combine} needs at least {least} updates, {count} are there",
            "wait for more facilities, or choose another rule",
        )


def krum_weights(gram_KK: Tensor, bad: int) -> list[float]:
    """All weight on the update nearest to its K - bad - 2 neighbours (Blanchard et al. 2017).

    gram_KK: the inner products of all updates; the distances follow from them. Two that are each
    other's nearest, as of three updates, are as near: the first of them is taken.
    """
    gram_KK = (gram_KK + gram_KK.T) / 2  # rounding may give a pair two products
    squares = gram_KK.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * gram_KK).clamp_min(0)
    count = len(squares)
    nearest = distances.sort(dim=1).values[:, 1 : count - bad - 1]
    best = int(nearest.sum(dim=1).argmin())
    return [float(number == best) for number in range(count)]


def clip_factors(squares: list[float], clip_norm: float | None) -> list[float]:
    """What each update is multiplied with so that none is longer than `clip_norm`.

    squares: of their lengths, with the same bits everywhere: the next model's bits follow from it.
    """
    if clip_norm is None:
        return [1.0 for _ in squares]
    return [min(1.0, clip_norm / math.sqrt(square)) if square > 0 else 1.0 for square in squares]


def squared_length(values_N: Tensor) -> float:
    """Of finite values, in fp64 and one order: no library's sum, whose order is a processor's."""
    part_N = values_N.double().square_()
    while len(part_N) > 1:
        half = len(part_N) // 2
        odd = part_N[2 * half :]
        part_N = torch.cat([part_N[:half] + part_N[half : 2 * half], odd])
    return float(part_N.sum())


def _normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def needs_norms_first(rule: Rule) -> bool:
    """Whether all updates must be measured before any is combined."""
    return rule.combine == "krum" or rule.clip_norm is not None
