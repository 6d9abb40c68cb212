"""Updates become the next global model: streamed, in fp32, in an order that never changes.

Memory holds a few stretches, whatever the size of the model. One pass reads every update once: it
measures and combines together, and only if what it measured forbids an update is it done again.
Legend: K updates, N values of a stretch.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.errors import UserError
from atoll.federation import combine, global_model
from atoll.federation.codec import CODECS
from atoll.federation.cohort import Cohort, cohorts_of, norms_before, share_out
from atoll.federation.error_feedback import read_decoded_into
from atoll.federation.fragments import fragments_of, joined
from atoll.federation.judge import Measured, cosines
from atoll.federation.next_model import NextModel, refuse_forgotten
from atoll.federation.tensors import STRETCH, Layout, Stretch, TensorReader, stretches
from atoll.federation.update import Update, refuse_wrong_tensors
from atoll.federation.update_files import read_verified, reason_of
from atoll.settings.exchange import UpdateManifest
from atoll.settings.federation import Rule

THREADS = 2
AHEAD = 4


@dataclass(frozen=True)
class Outcome:
    """Who had which weight in the next global model, and who was left out and why."""

    weights: dict[str, float]
    norms: dict[str, float]
    cosines: dict[str, float]
    rejected: dict[str, str] = field(default_factory=dict)


def verified(
    folder: Path, bases: list[str], overlap_rounds: int = 0, number: int | None = None
) -> Update:
    """An update whose files are as its manifest says, and that began from a known global model.

    bases: digests of this round's model, and of those before it from which work is still taken;
    that of `overlap_rounds` before is in time. number: of this round, where rounds have numbers: in
    the first ones, and behind one that was held, a model does not tell how late work is.
    """
    return from_base(read_verified(folder), folder, bases, overlap_rounds, number)


def from_base(
    manifest: UpdateManifest,
    folder: Path,
    bases: list[str],
    overlap_rounds: int = 0,
    number: int | None = None,
) -> Update:
    """An update whose files were verified, if it began from one of these global models."""
    if manifest.base not in bases:
        raise UserError(
            f"the update of {manifest.facility} began from {manifest.base[:12]}, this round from "
            f"{bases[0][:12]}",
            "train the model of this round, or allow late work: rule.max_staleness",
        )
    behind = bases.index(manifest.base) - overlap_rounds
    rounds_late = behind if number is None else number - manifest.round
    return Update(manifest, folder, max(0, rounds_late))


def aggregate(
    base: Path, updates: list[Update], rule: Rule, codec: str, out: Path, about: dict[str, Any]
) -> Outcome:
    """Write the next global model to `out`; nothing is there before it is whole.

    base: the global model of the round before. about: with fragments its `round` says which one is
    averaged; late updates of others are added to theirs. Raises `UserError` where too few updates
    are left for the rule or its quorum; the base is not touched.
    """
    layout, parts = _parts(base, rule)
    known = global_model.read_global(base)
    refuse_forgotten(base, known, rule, codec)
    rejected = _unfit(updates, parts, rule)
    fit = [update for update in updates if update.facility not in rejected]
    cohorts = cohorts_of(base, known, parts, fit, rule, rule.fragment(about.get("round", 1)))
    if combine.needs_norms_first(rule):
        for cohort in cohorts:
            cohort.measured = _one_pass(cohort, rule, None)
    while True:
        for cohort in cohorts:
            rejected |= cohort.leave_out(cohort.refused(rule))
        share_out(cohorts, rule, rejected)
        unfinished, sent = global_model.begin(out), joined(layout, [c.part for c in cohorts if c])
        with NextModel(base, unfinished, layout, sent, rule, codec) as next_model:
            for cohort in cohorts:
                cohort.measured = _one_pass(cohort, rule, next_model)
            _keep_others(next_model, layout, sent)
            files = next_model.written.digests()
        if any(cohort.refused(rule) for cohort in cohorts):
            continue
        if not any(cohort.share.overflows for cohort in cohorts):
            break
        for cohort in cohorts:
            rejected |= cohort.leave_out(cohort.overflowing())
    outcome = _outcome(cohorts, rejected)
    facts = {"base": known["digest"], "codec": codec, "rule": rule.model_dump(), **asdict(outcome)}
    refused = [update for update in updates if update.facility in rejected]
    facts |= _by_fragment(known, rule, cohorts, refused, about.get("round", 1))
    global_model.publish(unfinished, out, about | facts, files)
    return outcome


def hold(base: Path, rule: Rule, codec: str, out: Path, about: dict[str, Any]) -> Outcome:
    """A next global model of no update, as it was; what the server remembers stays as well.

    about: `rejected` and `refused_rounds` say whose updates were left out, and of which rounds.
    """
    refused = about.get("refused_rounds", {})
    layout, parts = _parts(base, rule)
    known = global_model.read_global(base)
    refuse_forgotten(base, known, rule, codec)
    unfinished = global_model.begin(out)
    fragment = rule.fragment(about.get("round", 1))
    sent = parts[fragment]
    with NextModel(base, unfinished, layout, sent, rule, codec) as next_model:
        for stretch in stretches(sent):
            next_model.hold(stretch)
            next_model.written.add(stretch)
        _keep_others(next_model, layout, sent)
        files = next_model.written.digests()
    outcome = Outcome({}, {}, {}, about.get("rejected", {}))
    facts = {"base": known["digest"], "codec": codec, "rule": rule.model_dump(), **asdict(outcome)}
    facts["norms_before"] = norms_before(known)
    facts |= changed_rounds(known, rule)
    facts |= {"refused_rounds": refused, "taken": known.get("taken", {})}
    facts |= _refusals(known, refused, rule, about.get("round", 1))
    facts["claims"] = known.get("claims", {}) | {str(fragment): []}
    global_model.publish(unfinished, out, about | facts, files)
    return outcome


def changed_rounds(known: dict[str, Any], rule: Rule) -> dict[str, dict[str, int]]:
    """Fragment -> the last of its turns that was averaged, and the last round that changed it.

    An older Atoll's models have the turns alone.
    """
    last = known.get("round", 0)
    turns = {str(rule.fragment(n)): n for n in range(max(1, last - rule.fragments + 1), last + 1)}
    return {name: known.get(name, turns) for name in ("averaged_rounds", "changed_rounds")}


def _by_fragment(
    known: dict[str, Any], rule: Rule, cohorts: list[Cohort], refused: list[Update], number: int
) -> dict[str, Any]:
    """What later rounds go by, of each fragment: lengths, claims, when it changed, and by whom.

    taken and refused: the last round of each facility whose update was. Late work says nothing of
    the length of others: beside it there is nobody to compare it with.
    """
    own, given = cohorts[0], {str(cohort.fragment): cohort for cohort in cohorts if cohort}
    claims = known.get("claims", {}) | {str(own.fragment): []}
    rounds = changed_rounds(known, rule)
    rounds["changed_rounds"] = rounds["changed_rounds"] | dict.fromkeys(given, number)
    if own:
        rounds["averaged_rounds"] = rounds["averaged_rounds"] | {str(own.fragment): number}
    taken = [update for cohort in cohorts for update in cohort.updates]
    return rounds | {
        "refused_rounds": _rounds(refused),
        "taken": _with_rounds(known.get("taken", {}), _rounds(taken), rule),
        **_refusals(known, _rounds(refused), rule, number),
        "norms_before": norms_before(known) | ({str(own.fragment): own.norms} if own else {}),
        "claims": claims | {n: c.claims(rule) for n, c in given.items()},
    }


def _refusals(
    known: dict[str, Any], rounds_of: dict[str, int], rule: Rule, number: int
) -> dict[str, dict[str, dict[str, int]]]:
    """Of each fragment and facility the last round whose update was refused, and that refused it.

    An older Atoll's models do not say the second: until then it was taken for the first.
    """
    of, before = known.get("refused", {}), known.get("refused_in", known.get("refused", {}))
    return {
        "refused": _with_rounds(of, rounds_of, rule),
        "refused_in": _with_rounds(before, rounds_of, rule, number),
    }


def _rounds(updates: list[Update]) -> dict[str, int]:
    return {update.facility: update.manifest.round for update in updates}


def _with_rounds(
    before: dict[str, dict[str, int]], rounds_of: dict[str, int], rule: Rule, at: int | None = None
) -> dict[str, dict[str, int]]:
    """Fragment -> facility -> the round of its update, these beside those before.

    at: another round that is written down for these, of the fragment that the update's is of.
    """
    rounds = {fragment: {**of} for fragment, of in before.items()}
    for facility, number in rounds_of.items():
        rounds.setdefault(str(rule.fragment(number)), {})[facility] = number if at is None else at
    return rounds


def _parts(base: Path, rule: Rule) -> tuple[Layout, list[Layout]]:
    """All tensors that learn, and those of each fragment."""
    with TensorReader(base / "master") as before:
        layout = before.layout
    return layout, fragments_of(layout, rule.fragments, rule.fragment_pattern)


def _keep_others(next_model: NextModel, layout: Layout, sent: Layout) -> None:
    changed = {name for tensors in sent.values() for name in tensors}
    for stretch in stretches(layout):
        if stretch.name not in changed:
            next_model.keep(stretch)
            next_model.written.add(stretch)


def _outcome(cohorts: list[Cohort], rejected: dict[str, str]) -> Outcome:
    weights, norms, angles = dict[str, float](), dict[str, float](), dict[str, float]()
    for cohort in cohorts:
        assert cohort.measured is not None
        weights |= dict(zip(cohort.names, cohort.weights, strict=True))
        norms |= dict(zip(cohort.names, cohort.measured.norms, strict=True))
        angles |= dict(zip(cohort.names, cosines(cohort.measured.gram_KK), strict=True))
    return Outcome(weights, norms, angles, rejected)


def _one_pass(cohort: Cohort, rule: Rule, next_model: NextModel | None) -> Measured:
    """Read every update once: measure, and with a next model combine."""
    updates, count = cohort.updates, len(cohort.updates)
    gram_KK = torch.zeros(count, count, dtype=torch.float64)
    not_finite_K = torch.zeros(count, dtype=torch.int64)
    squares_K = torch.zeros(count if rule.clip_norm is not None else 0, dtype=torch.float64)
    with ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
        encodings = [update.manifest.encoding for update in updates]
        readers = [stack.enter_context(update.tensors()) for update in updates]
        free = [torch.empty(count * STRETCH) for _ in range(THREADS)]  # new memory costs a core

        def work(stretch: Stretch) -> tuple[Tensor, Tensor, Tensor]:
            memory = free.pop()
            values_KN = _read_into(memory, readers, encodings, stretch)
            if next_model is not None:
                next_model.add(stretch, values_KN, cohort.share)
            gram, not_finite = _measured(values_KN)
            squares = [combine.squared_length(values_N) for values_N in values_KN[: len(squares_K)]]
            free.append(memory)
            return gram, not_finite, torch.tensor(squares, dtype=torch.float64)

        items = list(stretches(cohort.part if count else {}))
        for stretch, (gram, not_finite, squares) in zip(
            items, _in_order(pool, work, iter(items)), strict=True
        ):
            gram_KK += gram
            not_finite_K += not_finite
            squares_K += squares
            if next_model is not None:
                next_model.written.add(stretch)
    return Measured(gram_KK, not_finite_K.tolist(), squares_K.tolist())


def _read_into(
    memory: Tensor, readers: list[TensorReader], encodings: Sequence[str], stretch: Stretch
) -> Tensor:
    """The values of a stretch in every update, in memory that is large enough."""
    count = len(readers)
    values_KN = memory[: count * stretch.count].view(count, stretch.count)
    for values_N, reader, encoding in zip(values_KN, readers, encodings, strict=True):
        read_decoded_into(values_N, reader, encoding, stretch)
    return values_KN


def _measured(values_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products of each pair of updates, and of each how many values are not finite."""
    gram_KK = (values_KN @ values_KN.T).double()
    if bool(torch.isfinite(gram_KK).all()):
        return gram_KK, torch.zeros(len(values_KN), dtype=torch.int64)
    not_finite_K = (~torch.isfinite(values_KN)).sum(dim=1)
    wide_KN = torch.nan_to_num(values_KN.double(), nan=0.0, posinf=3e38, neginf=-3e38)
    return wide_KN @ wide_KN.T, not_finite_K


def _in_order(pool: ThreadPoolExecutor, work: Any, items: Iterator[Stretch]) -> Iterator[Any]:
    """Results in the order of the items, a few of them under way: sums have the same bits."""
    running = [pool.submit(work, item) for item in islice(items, AHEAD)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(work, item) for item in islice(items, 1)]


def _unfit(updates: list[Update], parts: list[Layout], rule: Rule) -> dict[str, str]:
    """Facility -> how its tensors differ from its fragment's, or that it is there twice."""
    rejected, seen = dict[str, str](), set[str]()
    for update in updates:
        encoding = CODECS[update.manifest.encoding].parts
        part = parts[rule.fragment(update.manifest.round)]
        try:
            if update.facility in seen:
                raise UserError(f"{update.facility} has two updates", "give one of each")
            seen.add(update.facility)
            with update.tensors(most=sum(map(len, part.values())) * len(encoding)) as reader:
                refuse_wrong_tensors(reader, update.manifest, part)
        except Exception as error:  # whatever one facility sent, the others go on
            rejected[update.facility] = reason_of(error)
    return rejected
