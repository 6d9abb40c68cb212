"""Maximal update parametrization (muP): rates found on a narrow model hold on a wide one.

Tensor Programs V (Yang et al. 2022), its table 3: all of it is in what parameters begin as and in
how fast they learn. What the paper's other tables multiply logits and scores with is in the weights
from the start, so that the forward pass, checkpoints and exports are those of any model.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atoll.errors import UserError
from atoll.models.parts import Parts
from atoll.settings import Mup

EXPERTS = ("num_local_experts", "num_experts")


@dataclass(frozen=True)
class Scale:
    """What a parameter's beginning and its steps are multiplied with."""

    initial: float = 1.0
    rate: float = 1.0  # of Adam
    orthogonal_rate: float = 1.0  # of Muon
    # as if a multiplier stood in the forward pass: what is clipped does not grow with the width
    gradient: float = 1.0


@dataclass(frozen=True)
class Widths:
    """A model against the one of the base width; all its blocks' widths are wider by one ratio."""

    ratio: float  # of the hidden sizes
    heads_ratio: float  # of the widths of a head; 1: the wider model has more heads
    blocks: str  # begins the names of the blocks' parameters
    before_logits: tuple[str, ...]  # begin the names of those that the logits' scale is in
    experts: int  # of a mixture's block, a number that does not grow; 0: none

    def scale(self, name: str, parameter: Tensor) -> Scale:
        """Of a parameter, by its name in the Hugging Face model."""
        own = name.removeprefix("hf.")
        if own.startswith(self.before_logits):
            share = 1 / self.ratio
            return Scale(share, share, share, share)
        if not own.startswith(self.blocks):
            return Scale()
        # scores of 1 / width instead of its root: that much smaller queries
        share = self.heads_ratio**-0.5 if ".q_proj." in own else 1.0
        if parameter.ndim < 2:
            return Scale(share, share, share, share)
        return Scale(
            initial=share / math.sqrt(self.ratio),
            rate=share / self.ratio,
            orthogonal_rate=share * self._of_orthogonal(parameter),
            gradient=share,
        )

    def _of_orthogonal(self, parameter: Tensor) -> float:
        """So that an update's spectral norm is as the root of outputs / inputs (Yang et al. 2023).

        Muon's own is as the root of the larger of the two, which grows with the width.
        """
        is_router = parameter.ndim == 2 and parameter.shape[0] == self.experts
        return 1 / self.ratio if is_router else 1 / math.sqrt(self.ratio)


def widths_of(mup: Mup, hf: Any, parts: Parts) -> Widths | None:
    """What muP scales of a whole model; None: nothing.

    Raises `UserError` for a model with more than norms between its blocks and its head.
    """
    if mup.base_width is None:
        return None
    config = hf.config
    norms = tuple(f"{name}." for name in parts.exit if name != parts.head)
    between = [name for name, _ in hf.named_parameters() if name.startswith(norms)]
    if not between or any("norm" not in name and "ln_f" not in name for name in between):
        raise UserError(
            f"model.mup.base_width={mup.base_width}: this {config.model_type} has no norm alone "
            "between its blocks and its head",
            "choose another, or set model.mup.base_width=null",
        )
    head_width = getattr(config, "head_dim", None)
    head_width = head_width or config.hidden_size // config.num_attention_heads
    return Widths(
        ratio=config.hidden_size / mup.base_width,
        heads_ratio=head_width / (mup.base_head_width or head_width),
        blocks=f"{parts.blocks}.",
        # a head that is the embedding leaves the scale of the logits to the norm before it
        before_logits=norms if config.tie_word_embeddings else (f"{parts.head}.weight",),
        experts=next((getattr(config, own) for own in EXPERTS if hasattr(config, own)), 0),
    )
