"""Where each architecture keeps its embedding, its blocks and its head.

transformers says it itself (`base_model_pp_plan`, or one list of blocks in the module tree); a line
here for those where it does not.
"""

from dataclasses import dataclass
from typing import Any

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


def parts_of(hf: Any) -> Parts:
    """The parts of a Hugging Face model; `UserError` for one that nothing says them of."""
    family = hf.config.model_type
    if family in PARTS:
        return PARTS[family]
    check_family(hf.config)
    prefix = hf.base_model_prefix
    blocks, before, after = _of_backbone(hf.get_submodule(prefix), hf.config)
    head = hf.get_output_embeddings() if hasattr(hf, "lm_head") else None
    head_name = next((name for name, module in hf.named_modules() if module is head), "lm_head")
    return Parts(
        prefix,
        f"{prefix}.{blocks}",
        head_name,
        entrance=tuple(f"{prefix}.{name}" for name in before),
        exit=(*(f"{prefix}.{name}" for name in after), head_name),
    )


def _of_backbone(backbone: nn.Module, config: Any) -> tuple[str, list[str], list[str]]:
    """The list of blocks, and what stands before and after it: as the plan or the tree has them."""
    children = dict(backbone.named_children())
    lists = [n for n, m in children.items() if isinstance(m, nn.ModuleList)]
    if len(lists) != 1 or len(list(children[lists[0]].children())) != config.num_hidden_layers:
        raise UserError(
            f"{type(backbone).__name__} is not one list of {config.num_hidden_layers} blocks",
            "choose a model of another family: `atoll models` lists them",
        )
    plan = getattr(config, "base_model_pp_plan", None)
    # positions that every stage turns its queries by have no weights
    own = [n for n, m in children.items() if n == lists[0] or _is_of_an_end(m)]
    names = [name for name in plan if name in children] if plan else own
    place = names.index(lists[0])
    return lists[0], names[:place], names[place + 1 :]


def _is_of_an_end(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def check_family(config: Any) -> None:
    """Raise `UserError` for an architecture that transformers has no text decoder of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    if config.model_type not in PARTS and config.model_type not in DECODERS:
        raise UserError(
            f"no parts are known for models of type {config.model_type!r}: transformers has no "
            "decoder of that name",
            "choose another: `atoll models` lists them",
        )


def blocks_of(model: nn.Module, parts: Parts) -> list[nn.Module]:
    blocks = model.get_submodule(parts.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)
