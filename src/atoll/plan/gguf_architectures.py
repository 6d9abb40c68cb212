"""Which models llama.cpp computes as they are here: its architectures, and what they have fixed.

GGUF files carry numbers that llama.cpp reads, and not those that its code has fixed (the widths of
windows' patterns, activations): a model that differs there would be computed otherwise, and is
refused. Source: llama.cpp's convert_hf_to_gguf.py and src/llama-model.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import UserError
from atoll.settings import Run

Config = Mapping[str, Any]
SILU = ("silu", "swish")
WINDOW, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Fixed:
    """A value that llama.cpp's code has; a configuration without the key has it too."""

    key: str
    holds: Callable[[Any, Config], bool]
    value: str  # what it is, in words


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp calls a family, and how its files differ from the hub's."""

    name: str
    fixed: tuple[Fixed, ...] = ()
    turns_rotary: bool = False  # rows of queries and keys in pairs, as in Meta's own files
    norm_offset: int = 0  # added to every norm, as it is used
    rope_types: tuple[str, ...] = ("default", "linear", "yarn")


def _one_of(key: str, *values: Any) -> Fixed:
    return Fixed(key, lambda value, _: value in values, " or ".join(map(str, values)))


def _windows(every: int) -> Fixed:
    def holds(kinds: Any, _: Config) -> bool:
        return all((kind == FULL) == ((i + 1) % every == 0) for i, kind in enumerate(kinds))

    return Fixed("layer_types", holds, f"each {every}th of all positions, the others of a window")


def _scale(large_layers: int) -> Fixed:
    """Scores are divided by the root of a head's width; in the largest of a family, of another."""

    def holds(scalar: Any, config: Config) -> bool:
        if config.get("num_hidden_layers") == large_layers:
            return bool(scalar == config["hidden_size"] // config["num_attention_heads"])
        return bool(scalar == config.get("head_dim", 256))

    return Fixed("query_pre_attn_scalar", holds, "head_dim")


COMMON = (
    _one_of("attention_bias", False),
    _one_of("mlp_bias", False),
    _one_of("use_sliding_window", False),
    _one_of("partial_rotary_factor", 1.0),
)
GATED = (*COMMON, _one_of("hidden_act", *SILU))
GEMMA = (*COMMON, _one_of("hidden_activation", "gelu_pytorch_tanh"))
LLAMA = Architecture(
    "llama", GATED, turns_rotary=True, rope_types=("default", "linear", "yarn", "llama3")
)
MIXTURE = (
    *GATED,
    _one_of("norm_topk_prob", True),
    _one_of("decoder_sparse_step", 1),
    _one_of("mlp_only_layers", []),
)
GEMMA2 = (*GEMMA, _windows(2), _scale(46))
GEMMA3 = (
    *GEMMA,
    _windows(6),
    _scale(62),
    _one_of("attn_logit_softcapping", None),
    _one_of("final_logit_softcapping", None),
)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2", GATED),
    "qwen3": Architecture("qwen3", GATED),
    "qwen3_moe": Architecture("qwen3moe", MIXTURE),
    "gemma2": Architecture("gemma2", GEMMA2, norm_offset=1),
    "gemma3_text": Architecture("gemma3", GEMMA3, norm_offset=1, rope_types=("default", "linear")),
}


def check_gguf(run: Run, config: Config) -> None:
    """Refuse `export.gguf` of what GGUF files, or llama.cpp, do not carry.

    Raises `UserError`.
    """
    if run.export.gguf_format is None:
        return
    if run.task.name == "classification":
        raise UserError(
            "export.gguf with task=classification: llama.cpp reads no head of labels",
            "export.gguf=false",
        )
    made = run.model.source is None and run.tokenizer.path is None
    if made and run.tokenizer.kind != "bpe":
        raise UserError(
            f"export.gguf with tokenizer.kind={run.tokenizer.kind}: llama.cpp has no such "
            "tokenizer",
            "tokenizer.kind=bpe, or export.gguf=false",
        )
    check_computed_alike(config)


def check_computed_alike(config: Config) -> Architecture:
    """The architecture of a configuration that llama.cpp computes as transformers does.

    Raises `UserError` for any other.
    """
    family = str(config.get("model_type"))
    architecture = ARCHITECTURES.get(family)
    if architecture is None:
        raise UserError(
            f"export.gguf of a model of type {family!r}: it is not among those whose GGUF was read "
            "back here",
            f"export.gguf=false, or choose one of {', '.join(ARCHITECTURES)}",
        )
    for fixed in architecture.fixed:
        if fixed.key in config and not fixed.holds(config[fixed.key], config):
            raise _differs(family, fixed.key, config[fixed.key], fixed.value)
    for rope in ropes(config).values():
        kind = rope.get("rope_type", "default")
        if kind not in architecture.rope_types:
            names = " or ".join(architecture.rope_types)
            raise _differs(family, "rope_type", kind, names)
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise _differs(family, "partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
        if kind == "yarn" and (own := sorted(YARN_CHOICES & {k for k, v in rope.items() if v})):
            raise _differs(family, own[0], rope[own[0]], "left unset")
    local = ropes(config).get(WINDOW, {})
    theta = local.get("rope_theta", config.get("rope_local_base_freq", 1e4))
    if architecture.name == "gemma3" and theta != 1e4:
        raise _differs(family, "rope_local_base_freq", theta, "10000")
    return architecture


YARN_CHOICES = {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"}


def ropes(config: Config) -> dict[str, Config]:
    """Kind of layer -> its rotary positions; of one kind, by the name of full attention."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return dict(rope) if FULL in rope else {FULL: rope}


def _differs(family: str, key: str, value: Any, wanted: str) -> UserError:
    return UserError(
        f"export.gguf: {family} with {key}={value}, which llama.cpp would compute otherwise "
        f"(there it is {wanted})",
        "export.gguf=false",
    )
