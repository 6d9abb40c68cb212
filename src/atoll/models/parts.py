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
    entrance: tuple[str, ...] = ()  # all that a pipeline's first stage alone has
    positions: str | None = None  # of these, what is added to hidden states; rotary models: nothing
    exit: tuple[str, ...] = ()  # all that its last stage alone has


PARTS = {
    "llama": Parts(
        "model",
        "model.layers",
        "lm_head",
        entrance=("model.embed_tokens",),
        exit=("model.norm", "lm_head"),
    ),
    "gpt2": Parts(
        "transformer",
        "transformer.h",
        "lm_head",
        entrance=("transformer.wte", "transformer.wpe", "transformer.drop"),
        positions="transformer.wpe",
        exit=("transformer.ln_f", "lm_head"),
    ),
    "opt": Parts(
        "model.decoder",
        "model.decoder.layers",
        "lm_head",
        entrance=(
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
            "model.decoder.project_in",
        ),
        positions="model.decoder.embed_positions",
        exit=("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
    ),
    "bert": Parts(
        "bert",
        "bert.encoder.layer",
        "cls.predictions.decoder",
        "cls.predictions.transform",
        entrance=("bert.embeddings",),
        positions="bert.embeddings.position_embeddings",
        exit=("cls",),
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
