"""The updates of a round, those of one fragment together: who is left out, and who counts how much.

Legend: K updates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from atoll.errors import UserError
from atoll.federation import combine, step
from atoll.federation.judge import Bound, Measured, judge
from atoll.federation.next_model import Share, share_of
from atoll.federation.tensors import Layout, TensorReader, stretches
from atoll.federation.update import Update
from atoll.settings.exchange import UpdateManifest
from atoll.settings.federation import Rule


class SmallCohort(UserError):
    """Fewer updates are left than the rule needs; `rejected`: facility -> why.

    too_late: facilities whose late work cannot make this round alone.
    """

    def __init__(self, found: str, rejected: dict[str, str], too_late: Sequence[str] = ()) -> None:
        super().__init__(found, "the global model stays: wait for more, or fix what is named")
        self.rejected, self.too_late = rejected, list(too_late)


@dataclass
class Cohort:
    """The updates of one fragment, and what each counts for."""

    fragment: int
    part: Layout
    updates: list[Update]
    bound: Bound
    taken_by: step.Step
    measured: Measured | None = None  # of the updates, as they are now
    weights: list[float] = field(default_factory=list)
    # of a late one: of those that its fragment was averaged of
    claims_before: list[float] = field(default_factory=list)
    share: Share = field(default_factory=lambda: share_of([], [], step.replace))

    def __bool__(self) -> bool:
        return bool(self.updates)

    @property
    def names(self) -> list[str]:
        return [update.facility for update in self.updates]

    def claims(self, rule: Rule) -> list[float]:
        """What those claim whose updates are in the fragment, since it was averaged."""
        return [*self.claims_before, *_claims(self.updates, rule)]

    @property
    def norms(self) -> list[float]:
        """What the next round of this fragment is to know of its updates' lengths."""
        assert self.measured is not None
        return self.bound.after(self.measured.norms)

    def refused(self, rule: Rule) -> dict[str, str]:
        """Facility -> why what was measured of its update forbids it."""
        if self.measured is None or not self:
            return {}
        return judge(self.measured, self.names, rule, self.bound)

    def overflowing(self) -> dict[str, str]:
        """The longest of updates that overflow together."""
        if not self.share.overflows or self.measured is None:
            return {}
        longest = self.measured.norms.index(max(self.measured.norms))
        many = sum(self.share.overflows)
        return {self.names[longest]: f"{many:,} values overflow in the server's step"}

    def leave_out(self, refused: dict[str, str]) -> dict[str, str]:
        places = [n for n, name in enumerate(self.names) if name not in refused]
        self.updates = [self.updates[n] for n in places]
        self.weights = [self.weights[n] for n in places if n < len(self.weights)]
        self.measured = self.measured and self.measured.only(places)
        return refused


def norms_before(known: dict[str, Any]) -> dict[str, list[float]]:
    """Fragment -> the usual lengths of its updates; campaigns of before had one fragment."""
    norms = known.get("norms_before", {})
    return {"0": norms} if isinstance(norms, list) else norms


def cohorts_of(
    base: Path,
    known: dict[str, Any],
    parts: list[Layout],
    updates: list[Update],
    rule: Rule,
    own: int,
) -> list[Cohort]:
    """The updates of the round's own fragment, then those that are late for another."""
    by_fragment: dict[int, list[Update]] = {own: []}
    for update in sorted(updates, key=lambda update: update.facility):
        number = rule.fragment(update.manifest.round)
        by_fragment.setdefault(number, []).append(update)
    before = norms_before(known)
    # an older Atoll's model does not say of whom: of as many as now
    claims = known.get(
        "claims", dict.fromkeys(map(str, by_fragment), _claims(by_fragment[own], rule))
    )
    return [
        Cohort(
            number,
            parts[number],
            by_fragment[number],
            Bound(before.get(str(number), []), cache(partial(norm_of, base, parts[number]))),
            (step.STEPS if number == own else step.LATE_STEPS)[rule.update],
            claims_before=[] if number == own else claims.get(str(number), []),
        )
        for number in sorted(by_fragment, key=lambda number: (number != own, number))
    ]


def _claims(updates: list[Update], rule: Rule) -> list[float]:
    return combine.WEIGH[rule.weigh]([update.manifest for update in updates], rule)


def share_out(cohorts: list[Cohort], rule: Rule, rejected: dict[str, str]) -> None:
    """Give each update its share, and what clipping multiplies it with.

    Those of the round's fragment add up to one; one that is late for another has the share that it
    had in time, beside those that the fragment was averaged of.
    Raises `SmallCohort` where too few are left for the quorum or the rule.
    """
    own, *others = cohorts
    updates = [update for cohort in cohorts for update in cohort.updates]
    if len(updates) < rule.quorum or not updates:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(rejected.items()))
        named = f" ({why})" if why else ""
        found = f"{len(updates)} updates are left, the quorum is {rule.quorum}{named}"
        raise SmallCohort(found, rejected)
    if not own and rule.overlap_rounds and rule.max_staleness:
        # who is late would not know in time that its turn is averaged, and send its work twice
        found = "nobody's update is in time, and rounds overlap"
        raise SmallCohort(found, rejected, [update.facility for update in updates])
    try:
        if own:
            combine.refuse_too_few(len(own.updates), rule)
            own.weights = combine.weights_of(*_manifests(own.updates), rule)
    except UserError as error:
        raise SmallCohort(error.found, rejected) from None
    for cohort in others:
        given = (*_manifests(cohort.updates), rule, cohort.claims_before)
        cohort.weights = combine.late_shares_of(*given)
    for cohort in cohorts:
        _clip(cohort, rule)


def _manifests(updates: list[Update]) -> tuple[list[UpdateManifest], list[int]]:
    """What they say of themselves, and how many rounds late each is."""
    return [update.manifest for update in updates], [update.rounds_late for update in updates]


def _clip(cohort: Cohort, rule: Rule) -> None:
    factors = [1.0] * len(cohort.updates)
    if cohort.measured is not None:
        factors = combine.clip_factors(cohort.measured.squares, rule.clip_norm) or factors
        if rule.combine == "krum" and cohort:
            scale = torch.tensor(factors, dtype=torch.float64)
            gram = cohort.measured.gram_KK * scale[:, None] * scale[None]
            cohort.weights = combine.krum_weights(gram, rule.krum_bad)
    cohort.share = share_of(cohort.weights, factors, cohort.taken_by)


def norm_of(base: Path, part: Layout) -> float:
    """The length of a fragment of the global model itself; of a zero one, of all the model.

    So begin the B of adapters: beside them is the A that they are to be multiplied with.
    """
    with TensorReader(base / "master") as reader:
        return _length(reader, part) or _length(reader, reader.floating)


def _length(reader: TensorReader, part: Layout) -> float:
    return math.sqrt(sum(float(reader.values(s).double().square().sum()) for s in stretches(part)))
