"""Updates become the next global model: streamed, in fp32, in an order that never changes.

Memory holds a few stretches, whatever the size of the model. One pass reads every update once: it
measures and combines together, and only if what it measured forbids an update is it done again.
Legend: K updates, N values of a stretch.
"""

import argparse
import json
import math
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.commands import VerbParser
from atoll.errors import UserError, printable
from atoll.federation import combine, global_model
from atoll.federation.codec import CODECS
from atoll.federation.error_feedback import read_decoded
from atoll.federation.judge import Bound, Measured, cosines, judge
from atoll.federation.next_model import NextModel
from atoll.federation.tensors import Layout, Stretch, TensorReader, stretches
from atoll.federation.update import refuse_wrong_files, refuse_wrong_tensors
from atoll.settings.exchange import UpdateManifest, read_manifest
from atoll.settings.federation import Rule, checked_settings

THREADS = 2
AHEAD = 4


@dataclass(frozen=True)
class Update:
    """An update whose files were verified, and who sent it."""

    manifest: UpdateManifest
    folder: Path
    rounds_late: int = 0

    @property
    def facility(self) -> str:
        return self.manifest.facility

    def tensors(self, most: int | None = None) -> TensorReader:
        return TensorReader(self.folder, self.manifest.files, most)


@dataclass(frozen=True)
class Outcome:
    """Who had which weight in the next global model, and who was left out and why."""

    weights: dict[str, float]
    norms: dict[str, float]
    cosines: dict[str, float]
    rejected: dict[str, str] = field(default_factory=dict)


class SmallCohort(UserError):
    """Fewer updates are left than the rule needs; `rejected`: facility -> why."""

    def __init__(self, found: str, rejected: dict[str, str]) -> None:
        super().__init__(found, "the global model stays: wait for more, or fix what is named")
        self.rejected = rejected


def main(argv: list[str]) -> int:
    """`atoll aggregate`: the next global model from updates whose senders are known."""
    arguments = _read(argv)
    rule = checked_settings(Rule, json.loads(arguments.rule), "rule.", "see settings/federation.py")
    bases = [global_model.read_global(arguments.base)["digest"], *arguments.older]
    updates, unreadable = [], dict[str, str]()
    for folder in [] if arguments.hold else arguments.updates:
        try:
            updates.append(verified(folder, bases))
        except Exception as error:  # whatever one facility sent, the others go on
            unreadable[folder.parent.name] = reason_of(error)
    about = json.loads(arguments.about) | {"unreadable": unreadable}
    _allow_many_files()
    try:
        if arguments.hold:
            outcome = hold(arguments.base, rule, arguments.codec, arguments.out, about)
        else:
            base, out = arguments.base, arguments.out
            outcome = aggregate(base, updates, rule, arguments.codec, out, about)
    except SmallCohort as error:
        facts = {"short": error.found, "rejected": error.rejected}
        print(json.dumps(facts | {"unreadable": unreadable}))
        return 0
    print(json.dumps(asdict(outcome) | {"unreadable": unreadable}))
    return 0


def _read(argv: list[str]) -> argparse.Namespace:
    parser = VerbParser("aggregate", main.__doc__)
    parser.add_argument("updates", nargs="*", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--older", action="append", default=[], help="digest of the model before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rule", default="{}", help="JSON: weigh, combine, update and the rest")
    parser.add_argument("--codec", default="fp32", choices=list(CODECS), help="of the delta")
    parser.add_argument("--about", default="{}", help="JSON: kept in the manifest")
    parser.add_argument("--hold", action="store_true", help="of no update: the model stays")
    return parser.read(argv)


def _allow_many_files() -> None:
    """Every file of every update is open at once: more than the usual 1,024 with large models."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def verified(folder: Path, bases: list[str]) -> Update:
    """An update whose files are as its manifest says, and that began from a known global model.

    bases: digests of this round's model, and of those before it from which work is still taken.
    """
    manifest = read_manifest(folder)
    if manifest.base not in bases:
        raise UserError(
            f"the update of {manifest.facility} began from {manifest.base[:12]}, this round from "
            f"{bases[0][:12]}",
            "train the model of this round, or allow late work: rule.max_staleness",
        )
    refuse_wrong_files(folder, manifest)
    return Update(manifest, folder, bases.index(manifest.base))


def aggregate(
    base: Path, updates: list[Update], rule: Rule, codec: str, out: Path, about: dict[str, Any]
) -> Outcome:
    """Write the next global model to `out`; nothing is there before it is whole.

    base: the global model that the updates began from. Raises `UserError` where too few updates
    are left for the rule or its quorum; the base is not touched.
    """
    with TensorReader(base / "master") as before:
        layout = before.layout
    known = global_model.read_global(base)
    bound = Bound(known.get("norms_before", []), cache(partial(norm_of, base)))
    rejected = _unfit(updates, layout)
    updates = [update for update in updates if update.facility not in rejected]
    updates.sort(key=lambda update: update.facility)
    measured = None
    if updates and combine.needs_norms_first(rule):
        measured = _one_pass(updates, layout, None)
    while True:
        if measured is not None:
            rejected |= (refused := judge(measured, _names(updates), rule, bound))
            places = [n for n, update in enumerate(updates) if update.facility not in refused]
            updates, measured = [updates[n] for n in places], measured.only(places)
        weights, factors = _weights(updates, rule, measured, rejected)
        unfinished = global_model.begin(out)
        with NextModel(base, unfinished, layout, rule, codec, weights, factors) as next_model:
            measured = _one_pass(updates, layout, next_model)
        if judge(measured, _names(updates), rule, bound):
            continue
        if not next_model.overflows:
            break
        longest = updates.pop(measured.norms.index(max(measured.norms)))
        rejected[longest.facility] = (
            f"{sum(next_model.overflows):,} values overflow in the server's step"
        )
        measured = None
    names = _names(updates)
    outcome = Outcome(
        weights=dict(zip(names, weights, strict=True)),
        norms=dict(zip(names, measured.norms, strict=True)),
        cosines=dict(zip(names, cosines(measured.gram_KK), strict=True)),
        rejected=rejected,
    )
    facts = {"base": known["digest"], "codec": codec, "rule": rule.model_dump(), **asdict(outcome)}
    facts["norms_before"] = bound.after(measured.norms)
    global_model.publish(unfinished, out, about | facts)
    return outcome


def hold(base: Path, rule: Rule, codec: str, out: Path, about: dict[str, Any]) -> Outcome:
    """A next global model of no update: what the server remembers stays as well."""
    with TensorReader(base / "master") as before:
        layout = before.layout
    known, unfinished = global_model.read_global(base), global_model.begin(out)
    with NextModel(base, unfinished, layout, rule, codec, [], [], hold=True) as next_model:
        for stretch in stretches(layout):
            next_model.add(stretch, torch.zeros(1, stretch.count))
    outcome = Outcome({}, {}, {})
    facts = {"base": known["digest"], "codec": codec, "rule": rule.model_dump(), **asdict(outcome)}
    facts["norms_before"] = known.get("norms_before", [])
    global_model.publish(unfinished, out, about | facts)
    return outcome


def _one_pass(updates: list[Update], layout: Layout, next_model: NextModel | None) -> Measured:
    """Read every update once: measure, and with a next model combine."""
    count = len(updates)
    gram_KK = torch.zeros(count, count, dtype=torch.float64)
    not_finite_K = torch.zeros(count, dtype=torch.int64)
    with ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
        encodings = [update.manifest.encoding for update in updates]
        readers = [stack.enter_context(update.tensors()) for update in updates]

        def work(stretch: Stretch) -> tuple[Tensor, Tensor]:
            encoded = zip(readers, encodings, strict=True)
            values_KN = torch.stack([read_decoded(*reader, stretch) for reader in encoded])
            if next_model is not None:
                next_model.add(stretch, values_KN)
            return _measured(values_KN)

        for gram, not_finite in _in_order(pool, work, stretches(layout)):
            gram_KK += gram
            not_finite_K += not_finite
    return Measured(gram_KK, not_finite_K.tolist())


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


def _unfit(updates: list[Update], layout: Layout) -> dict[str, str]:
    """Facility -> how its tensors differ from the model's, or that it is there twice."""
    rejected, seen = dict[str, str](), set[str]()
    tensors = sum(map(len, layout.values()))
    for update in updates:
        parts = CODECS[update.manifest.encoding].parts
        try:
            if update.facility in seen:
                raise UserError(f"{update.facility} has two updates", "give one of each")
            seen.add(update.facility)
            with update.tensors(most=tensors * len(parts)) as reader:
                refuse_wrong_tensors(reader, update.manifest, layout)
        except Exception as error:  # whatever one facility sent, the others go on
            rejected[update.facility] = reason_of(error)
    return rejected


def reason_of(error: Exception) -> str:
    """Why an update is left out, in one line."""
    found = error.found if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return printable(found, 500)


def _weights(
    updates: list[Update], rule: Rule, measured: Measured | None, rejected: dict[str, str]
) -> tuple[list[float], list[float]]:
    """The share of each update, and what clipping multiplies it with.

    Raises `SmallCohort` where too few are left for the quorum or the rule.
    """
    if len(updates) < rule.quorum or not updates:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(rejected.items()))
        named = f" ({why})" if why else ""
        found = f"{len(updates)} updates are left, the quorum is {rule.quorum}{named}"
        raise SmallCohort(found, rejected)
    late = [update.rounds_late for update in updates]
    try:
        combine.refuse_too_few(len(updates), rule)
        weights = combine.weights_of([update.manifest for update in updates], late, rule)
    except UserError as error:
        raise SmallCohort(error.found, rejected) from None
    factors = [1.0] * len(updates)
    if measured is not None:
        factors = combine.clip_factors(measured.norms, rule.clip_norm)
        if rule.combine == "krum":
            scale = torch.tensor(factors, dtype=torch.float64)
            gram = measured.gram_KK * scale[:, None] * scale[None]
            weights = combine.krum_weights(gram, rule.krum_bad)
    return weights, factors


def _names(updates: list[Update]) -> list[str]:
    return [update.facility for update in updates]


def norm_of(base: Path) -> float:
    """The length of the global model itself."""
    with TensorReader(base / "master") as reader:
        squares = (
            float(reader.values(s).double().square().sum()) for s in stretches(reader.layout)
        )
        return math.sqrt(sum(squares))
