"""The shape of a model from its Hugging Face configuration, and its numbers of parameters."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.errors import UserError
from atoll.plan.decoders import DECODERS, Decoder, Line, is_decoder, window_of
from atoll.settings import Model, Sharding

# A size of a shape -> what most configurations call it; a family says where its own differ.
NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
}
GPT2_NAMES = {
    "layers": "n_layer",
    "heads": "n_head",
    "hidden": "n_embd",
    "intermediate": "n_inner",
    "positions": "n_positions",
}


@dataclass(frozen=True)
class Family:
    """What an architecture's blocks have, its sizes by default, and what it calls them."""

    # (shape) -> parameters of one block: matrices, biases that are split with them, vectors
    block: "Callable[[Shape], tuple[int, int, int]]"
    # (shape) -> parameters outside the blocks, but for a head of its own
    rest: "Callable[[Shape], int]"
    defaults: Mapping[str, int]
    names: Mapping[str, str] = field(default_factory=dict)  # where they are not those of NAMES
    gated: bool = False  # the MLP has two matrices up, and one down
    splits_matrices: bool = True


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide what it needs."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool
    embedded: int  # width of an embedding, where it differs from hidden
    labels: int = 0  # of a classifier, which has no head as wide as the vocabulary
    head_dim: int = 0  # where heads are not as wide together as the hidden states
    attention_bias: int = 0  # whether projections have biases, where a family has a choice
    mlp_bias: int = 0
    experts: int = 0  # of a mixture's block
    active_experts: int = 0  # of them, those that a token goes through
    moe_intermediate: int = 0  # of one of them, where it is not that of other blocks
    window_tokens: int = 0  # that a token sees in the layers that have a window
    windowed_layers: int = 0

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate or self.intermediate

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @cached_property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @cached_property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    def attended_tokens(self, tokens: int) -> float:
        """What a token of a document of so many sees, on average over layers, its future counted.

        Both ways: a causal mask halves it, which no caller takes off.
        """
        beyond = max(0, tokens - self.window_tokens)
        unseen = beyond * (beyond + 1) / tokens
        return tokens - self.windowed_layers / self.layers * unseen

    @cached_property
    def block_parameters(self) -> int:
        return sum(family_of(self.family).block(self))

    @cached_property
    def expert_parameters(self) -> int:
        """Of a block's experts together, which ranks of the expert axis divide."""
        matrices = 3 if family_of(self.family).gated else 2
        return self.experts * matrices * self.hidden * self.expert_width

    @cached_property
    def block_vectors(self) -> int:
        """Parameters of a block that no tensor rank splits: norms and biases of its outputs."""
        return family_of(self.family).block(self)[2]

    @cached_property
    def block_matrices(self) -> int:
        """Numbers in a block's matrices, without those of experts, which are one tensor."""
        return family_of(self.family).block(self)[0] - self.expert_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.embedded

    @cached_property
    def rest_parameters(self) -> int:
        if self.labels:
            return family_of(self.family).rest(self) + self.labels * self.hidden
        return family_of(self.family).rest(self) + (0 if self.tied else self.head_parameters)

    @cached_property
    def multiplied_parameters(self) -> int:
        """Those that every token is multiplied with."""
        transform = self.hidden**2 if self.family == "bert" else 0
        block = family_of(self.family).block(self)[0]
        idle = self.experts - self.active_experts
        block -= idle * 3 * self.hidden * self.expert_width
        if self.labels:
            return self.layers * block
        return self.layers * block + self.head_parameters + transform

    @cached_property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.rest_parameters


def _biased_block(s: Shape) -> tuple[int, int, int]:
    """GPT-2, OPT, BERT: four square matrices, two wide ones, all with biases, two norms."""
    matrices = 4 * s.hidden * s.hidden + 2 * s.hidden * s.intermediate
    return matrices, 3 * s.hidden + s.intermediate, 6 * s.hidden


def _llama_rest(s: Shape) -> int:
    return s.vocabulary * s.hidden + s.hidden


def _gpt2_rest(s: Shape) -> int:
    return (s.vocabulary + s.positions + 2) * s.hidden


def _opt_rest(s: Shape) -> int:
    projections = 2 * s.embedded * s.hidden if s.embedded != s.hidden else 0
    # its positions begin at 2; a projected model ends without a norm
    return s.vocabulary * s.embedded + (s.positions + 4) * s.hidden + projections


def _bert_rest(s: Shape) -> int:
    embeddings = (s.vocabulary + s.positions + 2) * s.hidden + 2 * s.hidden
    transform = s.hidden * s.hidden + s.hidden + 2 * s.hidden
    # the head's bias is a second one where the head is not the embedding
    return embeddings + transform + s.vocabulary * (1 if s.tied else 2)


BASE_SIZES = {"layers": 12, "heads": 12, "hidden": 768, "intermediate": 3072}
DECODER_NAMES = {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}


def _decoder(line: Line) -> Family:
    """The family of a line; sizes that nothing gives are asked for by their names."""
    names = DECODER_NAMES | {"moe_intermediate": line.expert_width}
    names |= {"active_experts": "num_experts_per_tok"}
    return Family(
        line.block,
        lambda s: s.vocabulary * s.hidden + s.hidden,
        {"head_dim": line.head_dim, "tied": line.tied, "positions": 2048}
        | {"active_experts": line.active_experts},
        names,
        gated=line.block.gated,
        splits_matrices=line.splits_matrices,
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(
        Decoder(),
        _llama_rest,
        {"layers": 32, "heads": 32, "hidden": 4096, "intermediate": 11008}
        | {"positions": 2048, "vocabulary": 32000, "tied": False},
        DECODER_NAMES,
        gated=True,
    ),
    "gpt2": Family(
        _biased_block,
        _gpt2_rest,
        {"layers": 12, "heads": 12, "hidden": 768, "positions": 1024, "vocabulary": 50257},
        GPT2_NAMES,
        splits_matrices=False,
    ),
    "opt": Family(
        _biased_block,
        _opt_rest,
        BASE_SIZES | {"positions": 2048, "vocabulary": 50272},
        {"intermediate": "ffn_dim", "embedded": "word_embed_proj_dim"},
    ),
    "gpt_neox": Family(
        _biased_block,
        lambda s: (s.vocabulary + 2) * s.hidden,
        {"positions": 2048, "tied": False},
    ),
    "bert": Family(_biased_block, _bert_rest, BASE_SIZES | {"positions": 512, "vocabulary": 30522}),
}


FAMILIES |= {name: _decoder(line) for name, line in DECODERS.items()}
# of a family without a line: near enough for a plan; it is tried when it is first loaded
UNKNOWN = _decoder(Line())
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def family_of(name: str) -> Family:
    return FAMILIES.get(name, UNKNOWN)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a configuration (config.json's content) describes.

    Raises `UserError` for no text decoder, or one that lacks a size.
    """
    name = str(config.get("model_type"))
    family = family_of(name)
    given = {size: config.get(own) for size, own in {**NAMES, **family.names}.items()}
    sizes = {**family.defaults, **{size: v for size, v in given.items() if v is not None}}
    if name not in FAMILIES and is_decoder(name) is False:
        raise UserError(
            f"no parts are known for models of type {name!r}: transformers has no decoder of that "
            "name",
            f"choose one of {', '.join(FAMILIES)}, or any other that it has a decoder of",
        )
    if missing := [NAMES[n] for n in ("layers", "hidden", "heads", "vocabulary") if n not in sizes]:
        raise UserError(
            f"no parts are known for models of type {name!r}, and the configuration lacks "
            f"{', '.join(missing)}",
            "choose a text decoder: `atoll models` lists them",
        )
    hidden, heads = sizes["hidden"], sizes["heads"]
    sizes["experts"] = next((config[own] for own in EXPERTS if config.get(own)), 0)
    derived = {"kv_heads": heads, "embedded": hidden, "intermediate": 4 * hidden, "tied": True}
    numbers = {size: int(value) for size, value in (derived | sizes).items()}
    tied = bool(numbers.pop("tied"))
    window, windowed = window_of(config, numbers["layers"])
    shape = Shape(name, **numbers, tied=tied, window_tokens=window, windowed_layers=windowed)
    usual = shape.head_dim * shape.heads == shape.hidden
    shape = replace(shape, head_dim=0) if usual else shape
    return shape if shape.experts else replace(shape, active_experts=0, moe_intermediate=0)


def known_config(
    model: Model, environment: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """The configuration of a run's model where this machine has it, else None.

    A folder's or the hub cache's config.json, with `model.config` laid over it.
    """
    if model.source is None:
        return dict(model.config)
    for file in _config_files(model.source, environment):
        try:
            stored: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        return stored | model.config
    return dict(model.config) if "model_type" in model.config else None


def check_architecture(shape: Shape, sharding: Sharding) -> None:
    """Refuse axes that do not divide what they split, with both numbers.

    Raises `UserError`.
    """
    tensor, context, stages = sharding.tensor, sharding.context, sharding.pipeline
    if tensor > 1 and not family_of(shape.family).splits_matrices:
        raise UserError(
            f"sharding.tensor={tensor}: {_undivided(shape)}, which has no plan for tensor ranks",
            "sharding.tensor=1: context and pipeline go, and every way of sharding",
        )
    for name, size, what in (
        ("attention heads", shape.heads, tensor * context),
        ("key and value heads", shape.kv_heads, tensor * context),
        ("intermediate width", shape.intermediate, tensor),
        ("hidden width", shape.hidden, tensor),
    ):
        if size % what:
            raise UserError(
                f"the model's {name} ({size}) cannot be divided by sharding.tensor x context "
                f"({tensor} x {context})",
                "lower sharding.tensor or sharding.context",
            )
    _check_stages(shape, stages * sharding.stages_per_rank)
    _check_experts(shape, sharding.expert)


def _check_experts(shape: Shape, ranks: int) -> None:
    if ranks > 1 and not shape.experts:
        raise UserError(
            f"sharding.expert={ranks}: {shape.family} has no experts that could be divided",
            "sharding.expert=1: every way of sharding goes",
        )
    if shape.experts % ranks:
        raise UserError(
            f"the model's experts ({shape.experts}) cannot be divided by sharding.expert ({ranks})",
            "lower sharding.expert",
        )


def _undivided(shape: Shape) -> str:
    if shape.family == "gpt2":
        return "gpt2 keeps query, key and value in one transposed matrix"
    if shape.experts:
        return f"{shape.family} has {shape.experts} experts in one tensor"
    return f"{shape.family} has matrices or norms that belong to all heads together"


def _check_stages(shape: Shape, stages: int) -> None:
    if stages > shape.layers:
        raise UserError(
            f"the model has {shape.layers} layers, the pipeline {stages} stages",
            "lower sharding.pipeline or sharding.stages_per_rank",
        )


def _config_files(source: str, environment: Mapping[str, str]) -> list[Path]:
    folder = Path(source)
    if folder.is_dir():
        return [folder / "config.json"]
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    return sorted((hub / f"models--{source.replace('/', '--')}").glob("snapshots/*/config.json"))
