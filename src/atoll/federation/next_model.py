"""The files of the next global model, a stretch at a time: combine, step, encode, add.

Legend: K updates, N values of a stretch.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.errors import UserError
from atoll.federation import combine, global_model, step
from atoll.federation.digests_behind import DigestsBehind
from atoll.federation.error_feedback import encoded_layout, write_encoded
from atoll.federation.tensors import (
    Layout,
    Stretch,
    TensorReader,
    TensorWriter,
    copy_fixed,
    files_of,
    typed,
)
from atoll.settings.federation import Rule

RESIDUAL = "residual"  # in memory/: what encoding the global delta has left out so far


@dataclass(frozen=True)
class Share:
    """What each update of a fragment counts for, and how they are taken."""

    weights_K: Tensor
    factors_K: Tensor
    taken_by: step.Step
    overflows: list[int] = field(default_factory=list)  # values, of stretches that overflow


def share_of(weights: list[float], factors: list[float], taken_by: step.Step) -> Share:
    """Of updates with these weights, whose values clipping multiplies with `factors`."""
    scaled = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    return Share(torch.tensor(scaled, dtype=torch.float64), torch.tensor(factors), taken_by)


def fresh_memory(rule: Rule, codec: str) -> dict[str, float]:
    """What is remembered between rounds, and what each value of it begins as."""
    return step.fresh_memory(rule) | ({} if codec == "fp32" else {RESIDUAL: 0.0})


def refuse_forgotten(base: Path, known: dict[str, Any], rule: Rule, codec: str) -> None:
    """Raise `UserError` where what a base's own rule and codec made it remember is gone.

    known: its manifest; a first model's has no rule, and what a new rule needs begins anew.
    """
    if "rule" not in known:
        return
    kept = fresh_memory(Rule.model_validate(known["rule"]), known.get("codec", "fp32"))
    for name in fresh_memory(rule, codec):
        if name in kept and not files_of(folder := base / "memory" / name):
            raise UserError(
                f"{folder} is gone: what the server remembers of the rounds before",
                f"get it back; or, where its updates are kept, delete {base}: the same line makes "
                "it again",
            )


class NextModel(ExitStack):
    """The files of the next global model, while they are written.

    sent: the tensors that change, and travel.
    """

    def __init__(
        self,
        base: Path,
        partial: Path,
        layout: Layout,
        sent: Layout,
        rule: Rule,
        codec: str,
    ) -> None:
        super().__init__()
        self.rule, self.codec = rule, codec
        self.fresh = fresh_memory(rule, codec)
        wide = typed(layout, torch.float32)
        encoded = encoded_layout(sent, codec)
        self.before = self.enter_context(TensorReader(base / "master"))
        stays = self.before.stays
        master, export = (self.before.typed_as(x) for x in (torch.float32, _dtype(rule)))
        self.master = self.enter_context(TensorWriter(partial / "master", master, stays, True))
        self.export = self.enter_context(TensorWriter(partial / "export", export, stays, True))
        copy_fixed(self.before, self.master, self.export)
        self.written = DigestsBehind(self.master, layout)  # told by one thread, of each stretch
        self.delta = self.enter_context(TensorWriter(partial / "delta", encoded, (), True))
        self.memory, self.memory_before = dict[str, TensorWriter](), dict[str, TensorReader]()
        for name in self.fresh:
            after, before = partial / "memory" / name, base / "memory" / name
            self.memory[name] = self.enter_context(TensorWriter(after, wide, (), True))
            self.memory_before[name] = self.enter_context(TensorReader(before))
        global_model.copy_beside_weights(base / "export", partial / "export", rule.dtype, export)

    def add(self, stretch: Stretch, values_KN: Tensor, share: Share) -> None:
        """Combine, step, encode and write one stretch."""
        rule = self.rule
        memory = {name: self._remembered(name, stretch) for name in self.fresh}
        if rule.combine in ("median", "trimmed_mean"):
            values_KN = values_KN * share.factors_K[:, None]
        combined_N = combine.COMBINE[rule.combine](values_KN, share.weights_K, rule)
        added_N = share.taken_by(combined_N, memory, rule)
        decoded_N, residual_N = write_encoded(
            self.delta, self.codec, stretch, added_N, memory.get(RESIDUAL)
        )
        new_N = self.before.values(stretch) + decoded_N
        rounded_N = new_N.to(_dtype(rule))
        remembered = sum(not_finite(values_N) for values_N in memory.values())
        if overflows := not_finite(rounded_N) + remembered:
            share.overflows.append(overflows)
        self.written.put(stretch, new_N)
        self.export.put(stretch, rounded_N)
        for name, writer in self.memory.items():
            writer.put(stretch, residual_N if name == RESIDUAL else memory[name])

    def hold(self, stretch: Stretch) -> None:
        """What is in the round's fragment, and gets nothing: not even what is remembered of it.

        As a facility has it that adds the zeros that travel.
        """
        nothing_N = torch.zeros(stretch.count)
        decoded_N, _ = write_encoded(self.delta, self.codec, stretch, nothing_N, None)
        self._put(stretch, self.before.values(stretch) + decoded_N)

    def keep(self, stretch: Stretch) -> None:
        """What is in no fragment of this round: as it was, with what is remembered of it."""
        self._put(stretch, self.before.values(stretch))

    def _put(self, stretch: Stretch, values_N: Tensor) -> None:
        self.written.put(stretch, values_N)
        self.export.put(stretch, values_N.to(_dtype(self.rule)))
        for name, writer in self.memory.items():
            writer.put(stretch, self._remembered(name, stretch))

    def _remembered(self, name: str, stretch: Stretch) -> Tensor:
        before = self.memory_before[name]
        if stretch.name in before.entries:
            return before.values(stretch)
        return torch.full((stretch.count,), self.fresh[name])


def not_finite(values_N: Tensor) -> int:
    """How many are not; that all are is seen faster from their sum."""
    if math.isfinite(float(values_N.sum(dtype=torch.float32))):
        return 0
    return len(values_N) - int(torch.isfinite(values_N).sum())


def _dtype(rule: Rule) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, rule.dtype)
    return dtype
