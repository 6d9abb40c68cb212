"""Where each architecture keeps its embedding, its blocks and its head: one line a family."""

from dataclasses import dataclass

from torch import nn

from atoll.errors import UserError


@dataclass(frozen=True)
class Parts:
    """Dotted names inside a Hugging Face causal language model."""

    backbone: str  # tokens -> hidden states
    blocks: str  # the backbone's list of equal blocks
    head: str  # hidden states -> logits, a linear layer
    before_head: str | None = None  # hidden states -> hidden states, where there is such a thing


PARTS = {
    "llama": Parts("model", "model.layers", "lm_head"),
    "gpt2": Parts("transformer", "transformer.h", "lm_head"),
    "opt": Parts("model.decoder", "model.decoder.layers", "lm_head"),
    "bert": Parts(
        "bert", "bert.encoder.layer", "cls.predictions.decoder", "cls.predictions.transform"
    ),
}


def parts_of(model_type: str) -> Parts:
    """The parts of an architecture; `UserError` for one that has no line in the table."""
    if model_type not in PARTS:
        raise UserError(
            f"no parts are known for models of type {model_type!r}",
            f"choose one of {', '.join(PARTS)}, or add a line to PARTS in models/parts.py",
        )
    return PARTS[model_type]


def blocks_of(model: nn.Module, parts: Parts) -> list[nn.Module]:
    blocks = model.get_submodule(parts.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)
