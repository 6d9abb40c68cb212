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
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.commands import VerbParser
from atoll.errors import UserError
from atoll.federation import combine, global_model, step
from atoll.federation.codec import CODECS
from atoll.federation.error_feedback import encoded_layout, read_decoded, write_encoded
from atoll.federation.tensors import Layout, Stretch, TensorReader, TensorWriter, stretches, typed
from atoll.federation.update import (
    UpdateManifest,
    read_manifest,
    refuse_wrong_files,
    refuse_wrong_tensors,
)
from atoll.settings.federation import Rule, checked_settings

THREADS = 2
AHEAD = 4
RESIDUAL = "residual"  # in memory/: what encoding the global delta has left out so far


@dataclass(frozen=True)
class Update:
    """An update whose files were verified, and who sent it."""

    manifest: UpdateManifest
    folder: Path
    rounds_late: int = 0

    @property
    def facility(self) -> str:
        return self.manifest.facility

    def tensors(self) -> TensorReader:
        return TensorReader(self.folder, self.manifest.files)


@dataclass(frozen=True)
class Measured:
    """Of the updates, in order: inner products of each pair, and values that are not finite."""

    gram_KK: Tensor
    not_finite: list[int]

    @property
    def norms(self) -> list[float]:
        return [math.sqrt(max(0.0, value)) for value in self.gram_KK.diagonal().tolist()]

    def only(self, places: list[int]) -> "Measured":
        return Measured(self.gram_KK[places][:, places], [self.not_finite[n] for n in places])


@dataclass(frozen=True)
class Outcome:
    """Who had which weight in the next global model, and who was left out and why."""

    weights: dict[str, float]
    norms: dict[str, float]
    cosines: dict[str, float]
    rejected: dict[str, str] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    """`atoll aggregate`: the next global model from updates whose senders are known."""
    arguments = _read(argv)
    rule = checked_settings(Rule, json.loads(arguments.rule), "rule.", "see settings/federation.py")
    bases = [global_model.read_global(arguments.base)["digest"], *arguments.older]
    updates, unreadable = [], dict[str, str]()
    for folder in arguments.updates:
        try:
            updates.append(verified(folder, bases))
        except UserError as error:
            unreadable[folder.parent.name] = error.found
    about = json.loads(arguments.about) | {"unreadable": unreadable}
    _allow_many_files()
    outcome = aggregate(arguments.base, updates, rule, arguments.codec, arguments.out, about)
    print(json.dumps(asdict(outcome) | {"unreadable": unreadable}))
    return 0


def _read(argv: list[str]) -> argparse.Namespace:
    parser = VerbParser("aggregate", main.__doc__)
    parser.add_argument("updates", nargs="+", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--older", action="append", default=[], help="digest of the model before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rule", default="{}", help="JSON: weigh, combine, update and the rest")
    parser.add_argument("--codec", default="fp32", choices=list(CODECS), help="of the delta")
    parser.add_argument("--about", default="{}", help="JSON: kept in the manifest")
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
    rejected = _unfit(updates, layout)
    updates = [update for update in updates if update.facility not in rejected]
    updates.sort(key=lambda update: update.facility)
    measured = None
    if updates and combine.needs_norms_first(rule):
        measured = _one_pass(updates, layout, None)
    while True:
        if measured is not None:
            rejected |= (refused := judge(measured, updates, rule))
            places = [n for n, update in enumerate(updates) if update.facility not in refused]
            updates, measured = [updates[n] for n in places], measured.only(places)
        _refuse_small_cohort(updates, rule, rejected)
        weights, factors = _weights(updates, rule, measured)
        partial = global_model.begin(out)
        with NextModel(base, partial, layout, rule, codec, weights, factors) as next_model:
            measured = _one_pass(updates, layout, next_model)
        if not judge(measured, updates, rule):
            break
    names = [update.facility for update in updates]
    outcome = Outcome(
        weights=dict(zip(names, weights, strict=True)),
        norms=dict(zip(names, measured.norms, strict=True)),
        cosines=dict(zip(names, cosines(measured.gram_KK), strict=True)),
        rejected=rejected,
    )
    previous = global_model.read_global(base)["digest"]
    facts = {"base": previous, "codec": codec, "rule": rule.model_dump(), **asdict(outcome)}
    global_model.publish(partial, out, about | facts)
    return outcome


def judge(measured: Measured, updates: list[Update], rule: Rule) -> dict[str, str]:
    """Facility -> why its update is left out: not finite, far too long, or the wrong way."""
    names, norms = [update.facility for update in updates], measured.norms
    refused = {
        name: f"{count:,} values are not finite"
        for name, count in zip(names, measured.not_finite, strict=True)
        if count
    }
    places = [n for n, name in enumerate(names) if name not in refused]
    median = sorted(norms[n] for n in places)[(len(places) - 1) // 2] if places else 0.0
    for n in places:
        if norms[n] > rule.max_norm_ratio * median:
            refused[names[n]] = (
                f"its norm {norms[n]:.3g} is more than {rule.max_norm_ratio:g} times the "
                f"median {median:.3g}"
            )
    places = [n for n in places if names[n] not in refused]
    if len(places) >= 2:
        angles = cosines(measured.only(places).gram_KK)
        lowest = min(angles)
        if lowest < rule.min_cosine:  # of two, nobody knows which
            wrong = places if len(places) == 2 else [places[angles.index(lowest)]]
            why = f"its cosine to the others, {lowest:.2f}, is below {rule.min_cosine:g}"
            refused |= {names[n]: why for n in wrong}
    return refused


def cosines(gram_KK: Tensor) -> list[float]:
    """Of each update to the sum of the others; 1 where there are no others."""
    cosine_K = []
    for n in range(len(gram_KK)):
        others = [k for k in range(len(gram_KK)) if k != n]
        dot = float(gram_KK[n, others].sum())
        length = math.sqrt(max(0.0, float(gram_KK[n, n] * gram_KK[others][:, others].sum())))
        cosine_K.append(dot / length if others and length > 0 else 1.0)
    return cosine_K


class NextModel(ExitStack):
    """The files of the next global model, while they are written."""

    def __init__(
        self,
        base: Path,
        partial: Path,
        layout: Layout,
        rule: Rule,
        codec: str,
        weights: list[float],
        factors: list[float],
    ) -> None:
        super().__init__()
        scaled = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        self.rule, self.codec = rule, codec
        self.weights_K = torch.tensor(scaled, dtype=torch.float64)
        self.factors_K = torch.tensor(factors)
        self.fresh = step.fresh_memory(rule) | ({} if codec == "fp32" else {RESIDUAL: 0.0})
        wide = typed(layout, torch.float32)
        half = typed(layout, getattr(torch, rule.dtype))
        encoded = encoded_layout(layout, codec)
        self.before = self.enter_context(TensorReader(base / "master"))
        self.master = self.enter_context(TensorWriter(partial / "master", wide))
        self.export = self.enter_context(TensorWriter(partial / "export", half))
        self.delta = self.enter_context(TensorWriter(partial / "delta", encoded))
        self.memory, self.memory_before = dict[str, TensorWriter](), dict[str, TensorReader]()
        for name in self.fresh:
            after, before = partial / "memory" / name, base / "memory" / name
            self.memory[name] = self.enter_context(TensorWriter(after, wide))
            self.memory_before[name] = self.enter_context(TensorReader(before))
        global_model.copy_beside_weights(base / "export", partial / "export", rule.dtype)

    def add(self, stretch: Stretch, values_KN: Tensor) -> None:
        """Combine, step, encode and write one stretch."""
        rule = self.rule
        if rule.combine in ("median", "trimmed_mean"):
            values_KN = values_KN * self.factors_K[:, None]
        combined_N = combine.COMBINE[rule.combine](values_KN, self.weights_K, rule)
        memory = {name: self._remembered(name, stretch) for name in self.fresh}
        added_N = step.STEPS[rule.update](combined_N, memory, rule)
        decoded_N, residual_N = write_encoded(
            self.delta, self.codec, stretch, added_N, memory.get(RESIDUAL)
        )
        new_N = self.before.values(stretch) + decoded_N
        self.master.put(stretch, new_N)
        self.export.put(stretch, new_N)
        for name, writer in self.memory.items():
            writer.put(stretch, residual_N if name == RESIDUAL else memory[name])

    def _remembered(self, name: str, stretch: Stretch) -> Tensor:
        before = self.memory_before[name]
        if stretch.name in before.entries:
            return before.values(stretch)
        return torch.full((stretch.count,), self.fresh[name])


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
    return torch.nan_to_num(gram_KK, nan=0.0, posinf=3e38, neginf=-3e38), not_finite_K


def _in_order(pool: ThreadPoolExecutor, work: Any, items: Iterator[Stretch]) -> Iterator[Any]:
    """Results in the order of the items, a few of them under way: sums have the same bits."""
    running = [pool.submit(work, item) for item in islice(items, AHEAD)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(work, item) for item in islice(items, 1)]


def _unfit(updates: list[Update], layout: Layout) -> dict[str, str]:
    """Facility -> how its tensors differ from the model's."""
    rejected = {}
    for update in updates:
        try:
            with update.tensors() as reader:
                refuse_wrong_tensors(reader, update.manifest, layout)
        except UserError as error:
            rejected[update.facility] = error.found
    return rejected


def _refuse_small_cohort(updates: list[Update], rule: Rule, rejected: dict[str, str]) -> None:
    if len(updates) < rule.quorum or not updates:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(rejected.items()))
        raise UserError(
            f"{len(updates)} updates are left, the quorum is {rule.quorum}"
            + (f" ({why})" if why else ""),
            "the global model stays as it is: wait for more, or fix what is named",
        )
    combine.refuse_too_few(len(updates), rule)


def _weights(
    updates: list[Update], rule: Rule, measured: Measured | None
) -> tuple[list[float], list[float]]:
    """The share of each update, and what clipping multiplies it with."""
    late = [update.rounds_late for update in updates]
    weights = combine.weights_of([update.manifest for update in updates], late, rule)
    factors = [1.0] * len(updates)
    if measured is not None:
        factors = combine.clip_factors(measured.norms, rule.clip_norm)
        if rule.combine == "krum":
            scale = torch.tensor(factors, dtype=torch.float64)
            gram = measured.gram_KK * scale[:, None] * scale[None]
            weights = combine.krum_weights(gram, rule.krum_bad)
    return weights, factors
