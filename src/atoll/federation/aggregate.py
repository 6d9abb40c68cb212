"""Updates become the next global model: streamed, in fp32, in an order that never changes.

Memory holds a few stretches, whatever the size of the model. One pass reads every update once: it
measures and combines together, and only if what it measured forbids an update is it done again.
Legend: K updates, N values of a stretch.
"""

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from atoll.errors import UserError
from atoll.federation import combine, model, step
from atoll.federation.codec import CODECS
from atoll.federation.model import Shapes, Stretch
from atoll.federation.tensors import Reader, Writer
from atoll.federation.update import (
    Manifest,
    read_manifest,
    refuse_wrong_files,
    refuse_wrong_tensors,
)
from atoll.settings.federation import Rule

THREADS = 2
AHEAD = 4
FEEDBACK = "feedback"  # what encoding the global difference has left out so far


@dataclass(frozen=True)
class Update:
    """An update whose files were verified, and who sent it."""

    manifest: Manifest
    folder: Path
    rounds_late: int = 0


@dataclass
class Measured:
    """Of the updates, in order: inner products of each pair, and values that are not finite."""

    gram_KK: Tensor
    not_finite: list[int]

    @property
    def norms(self) -> list[float]:
        return [math.sqrt(max(0.0, value)) for value in self.gram_KK.diagonal().tolist()]


@dataclass(frozen=True)
class Outcome:
    """Who had which weight in the next global model, and who was left out and why."""

    weights: dict[str, float]
    norms: dict[str, float]
    cosines: dict[str, float]
    rejected: dict[str, str] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    """`atoll aggregate`: the next global model from updates whose senders are known."""
    parser = argparse.ArgumentParser(prog="atoll aggregate", description=main.__doc__)
    parser.add_argument("updates", nargs="+", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--older", action="append", default=[], help="digest of the model before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rule", default="{}", help="JSON: weigh, combine, update and the rest")
    parser.add_argument("--codec", default="fp32", choices=list(CODECS), help="of the difference")
    parser.add_argument("--about", default="{}", help="JSON: kept in the manifest")
    arguments = parser.parse_args(argv)
    rule = checked_rule(json.loads(arguments.rule))
    bases = [model.read_global(arguments.base)["digest"], *arguments.older]
    found, rejected = [], dict[str, str]()
    for folder in arguments.updates:
        try:
            found.append(verified(folder, bases))
        except UserError as error:
            rejected[folder.parent.name] = error.found
    about = json.loads(arguments.about) | {"unreadable": rejected}
    outcome = aggregate(arguments.base, found, rule, arguments.codec, arguments.out, about)
    print(json.dumps(asdict(outcome) | {"unreadable": rejected}))
    return 0


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


def checked_rule(values: dict[str, Any]) -> Rule:
    try:
        return Rule.model_validate(values)
    except ValidationError as error:
        one = error.errors()[0]
        name = ".".join(map(str, one["loc"]))
        raise UserError(f"rule.{name}: {one['msg']}", "see settings/federation.py") from None


def aggregate(
    base: Path, updates: list[Update], rule: Rule, codec: str, out: Path, about: dict[str, Any]
) -> Outcome:
    """Write the next global model to `out`; nothing is there before it is whole.

    base: the global model that the updates began from. Raises `UserError` where too few updates
    are left for the rule or its quorum; the base is not touched.
    """
    updates = sorted(updates, key=lambda one: one.manifest.facility)
    shapes = model.shapes_of(base / "master")
    rejected = _unfit(updates, shapes)
    kept = [one for one in updates if one.manifest.facility not in rejected]
    measured = _all(base, kept, rule, shapes, None, codec) if _measure_first(kept, rule) else None
    while True:
        if measured is not None:
            forbidden = judge(measured, kept, rule)
            rejected |= forbidden
            keep = [n for n, one in enumerate(kept) if one.manifest.facility not in forbidden]
            kept = [kept[n] for n in keep]
            known = Measured(measured.gram_KK[keep][:, keep], [0] * len(keep))
        _refuse_small_cohort(kept, rule, rejected)
        weights, factors = _weights(kept, rule, known if measured is not None else None)
        partial = model.begin(out)
        scaled = [w * f for w, f in zip(weights, factors, strict=True)]
        target = _Target(
            base,
            partial,
            rule,
            codec,
            torch.tensor(scaled, dtype=torch.float64),
            torch.tensor(factors),
        )
        again = _all(base, kept, rule, shapes, target, codec)
        if not judge(again, kept, rule):
            break
        measured = again
    names = [one.manifest.facility for one in kept]
    outcome = Outcome(
        weights=dict(zip(names, weights, strict=True)),
        norms=dict(zip(names, again.norms, strict=True)),
        cosines=dict(zip(names, cosines(again.gram_KK), strict=True)),
        rejected=rejected,
    )
    previous = model.read_global(base)["digest"]
    facts = {"base": previous, "codec": codec, "rule": rule.model_dump(), **asdict(outcome)}
    model.publish(partial, out, about | facts)
    return outcome


def judge(measured: Measured, updates: list[Update], rule: Rule) -> dict[str, str]:
    """Facility -> why its update is left out: not finite, far too long, or the wrong way."""
    found: dict[str, str] = {}
    names = [one.manifest.facility for one in updates]
    for name, count in zip(names, measured.not_finite, strict=True):
        if count:
            found[name] = f"{count:,} values are not finite"
    left = [n for n, name in enumerate(names) if name not in found]
    norms = measured.norms
    if left:
        usual = sorted(norms[n] for n in left)[(len(left) - 1) // 2]
        for n in left:
            if norms[n] > rule.max_norm_ratio * usual:
                found[names[n]] = (
                    f"its norm {norms[n]:.3g} is more than {rule.max_norm_ratio:g} times the "
                    f"median {usual:.3g}"
                )
    left = [n for n in left if names[n] not in found]
    gram = measured.gram_KK[left][:, left]
    if len(left) >= 2:
        angles = cosines(gram)
        worst = min(range(len(left)), key=lambda n: angles[n])
        if angles[worst] < rule.min_cosine:
            wrong = left if len(left) == 2 else [left[worst]]  # of two, nobody knows which
            for n in wrong:
                found[names[n]] = (
                    f"its cosine to the others, {angles[worst]:.2f}, is below {rule.min_cosine:g}"
                )
    return found


def cosines(gram_KK: Tensor) -> list[float]:
    """Of each update to the sum of the others; 1 where there are no others."""
    count = len(gram_KK)
    found = []
    for n in range(count):
        others = [k for k in range(count) if k != n]
        dot = float(gram_KK[n, others].sum())
        length = math.sqrt(max(0.0, float(gram_KK[n, n] * gram_KK[others][:, others].sum())))
        found.append(dot / length if others and length > 0 else 1.0)
    return found


class _Target:
    """The files of the next global model, while they are written."""

    def __init__(
        self,
        base: Path,
        partial: Path,
        rule: Rule,
        codec: str,
        weights_K: Tensor,
        factors_K: Tensor,
    ) -> None:
        self.base, self.partial, self.rule, self.codec = base, partial, rule, codec
        self.weights_K, self.factors_K = weights_K, factors_K
        self.memory = step.fresh_memory(rule) | ({} if codec == "fp32" else {FEEDBACK: 0.0})
        for name in ("master", "delta", "export", *(f"memory/{one}" for one in self.memory)):
            (partial / name).mkdir(parents=True)
        model.copy_beside_weights(base / "export", partial / "export", rule.dtype)

    def open(self, file: str, shapes: Shapes, stack: ExitStack) -> None:
        wide = model.plain_shapes(shapes, torch.float32)
        half = model.plain_shapes(shapes, getattr(torch, self.rule.dtype))
        self.old = Reader(self.base / "master" / file)
        stack.callback(self.old.close)
        self.master = Writer(self.partial / "master" / file, wide)
        self.export = Writer(self.partial / "export" / file, half)
        encoded = model.encoded_shapes(shapes, self.codec)
        self.delta = Writer(self.partial / "delta" / file, encoded)
        self.memories = {n: Writer(self.partial / "memory" / n / file, wide) for n in self.memory}
        self.past = {}
        for name in self.memory:
            path = self.base / "memory" / name / file
            if path.is_file():
                self.past[name] = Reader(path)
                stack.callback(self.past[name].close)
        writers = (self.master, self.export, self.delta, *self.memories.values())
        for writer in writers:
            stack.callback(writer.finish)

    def take(self, stretch: Stretch, values_KN: Tensor) -> None:
        """Combine, step, encode and write one stretch."""
        place = (stretch.name, stretch.first)
        rule, coding = self.rule, CODECS[self.codec]
        if rule.combine in ("median", "trimmed_mean"):
            values_KN = values_KN * self.factors_K[:, None]
        combined_N = combine.COMBINE[rule.combine](values_KN, self.weights_K, rule)
        memory = {
            name: self.past[name].values(*place, stretch.count)
            if name in self.past
            else torch.full((stretch.count,), begin)
            for name, begin in self.memory.items()
        }
        added_N = step.STEPS[rule.update](combined_N, memory, rule)
        if FEEDBACK in memory:
            added_N = added_N + memory[FEEDBACK]
        parts = coding.encode(added_N)
        decoded_N = coding.decode(parts, stretch.count)
        if FEEDBACK in memory:
            memory[FEEDBACK] = added_N - decoded_N
        for suffix, (_, per_block) in coding.parts.items():
            first, _ = model.part_of(stretch, per_block)
            self.delta.put(stretch.name + suffix, first, parts[suffix])
        new_N = self.old.values(*place, stretch.count) + decoded_N
        self.master.put(*place, new_N)
        self.export.put(*place, new_N)
        for name, writer in self.memories.items():
            writer.put(*place, memory[name])


def _all(
    base: Path,
    updates: list[Update],
    rule: Rule,
    shapes: dict[str, Shapes],
    target: _Target | None,
    codec: str,
) -> Measured:
    """Read every update once: measure, and with a target combine."""
    count = len(updates)
    total = torch.zeros(count, count, dtype=torch.float64)
    not_finite = [0] * count
    with ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
        readers = [_by_tensor(one, stack) for one in updates]

        def work(stretch: Stretch) -> tuple[Tensor, list[int]]:
            values_KN = torch.stack(
                [_decoded(one, of, stretch) for one, of in zip(updates, readers, strict=True)]
            )
            gram = (values_KN @ values_KN.T).double()
            bad = [0] * count
            if not bool(torch.isfinite(gram).all()):
                bad = (~torch.isfinite(values_KN)).sum(dim=1).tolist()
                gram = torch.nan_to_num(gram, nan=0.0, posinf=3e38, neginf=-3e38)
            if target is not None:
                target.take(stretch, values_KN)
            return gram, bad

        for file, tensors in shapes.items():
            with ExitStack() as files:
                if target is not None:
                    target.open(file, tensors, files)
                for gram, bad in _in_order(pool, work, model.stretches({file: tensors})):
                    total += gram
                    not_finite = [a + b for a, b in zip(not_finite, bad, strict=True)]
    return Measured(total, not_finite)


def _in_order(pool: ThreadPoolExecutor, work: Any, items: Iterator[Stretch]) -> Iterator[Any]:
    """Results in the order of the items, a few of them under way: sums have the same bits."""
    running = [pool.submit(work, item) for item in islice(items, AHEAD)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(work, item) for item in islice(items, 1)]


def _by_tensor(update: Update, stack: ExitStack) -> dict[str, Reader]:
    """Tensor -> the file of the update that holds it."""
    found: dict[str, Reader] = {}
    for name in sorted(update.manifest.files):
        reader = Reader(update.folder / name)
        stack.callback(reader.close)
        found |= dict.fromkeys(reader.entries, reader)
    return found


def _decoded(update: Update, readers: dict[str, Reader], stretch: Stretch) -> Tensor:
    coding = CODECS[update.manifest.encoding]
    parts = {
        suffix: readers[stretch.name + suffix].values(
            stretch.name + suffix, *model.part_of(stretch, per_block)
        )
        for suffix, (_, per_block) in coding.parts.items()
    }
    return coding.decode(parts, stretch.count)


def _unfit(updates: list[Update], shapes: dict[str, Shapes]) -> dict[str, str]:
    """Facility -> how its tensors differ from the model's."""
    together = {name: shape for tensors in shapes.values() for name, shape in tensors.items()}
    found = {}
    for one in updates:
        with ExitStack() as stack:
            try:
                readers = list(dict.fromkeys(_by_tensor(one, stack).values()))
                refuse_wrong_tensors(readers, one.manifest, together)
            except UserError as error:
                found[one.manifest.facility] = error.found
    return found


def _measure_first(updates: list[Update], rule: Rule) -> bool:
    return bool(updates) and combine.needs_norms_first(rule)


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
    late = [one.rounds_late for one in updates]
    weights = combine.weights_of([one.manifest for one in updates], late, rule)
    factors = [1.0] * len(updates)
    if measured is not None:
        factors = combine.clip_factors(measured.norms, rule.clip_norm)
        if rule.combine == "krum":
            scale = torch.tensor(factors, dtype=torch.float64)
            gram = measured.gram_KK * scale[:, None] * scale[None]
            weights = combine.krum_weights(gram, rule.krum_bad)
    return weights, factors
