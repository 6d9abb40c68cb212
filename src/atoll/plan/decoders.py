"""What the blocks of decoders have beside Llama's: one line a family, held against the models."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """The parameters of one block, from a shape: matrices, biases split with them, vectors."""

    norms: int = 2  # vectors as wide as the hidden states; a norm with a bias has two
    query_norms: str = ""  # of queries and keys: as wide as one head, or as all of them
    qkv_bias: bool = False  # always; `attention_bias` where it is a choice
    gated: bool = True  # the MLP has two matrices up, and one down
    more: int = 0  # an activation function's own

    def __call__(self, s: Any) -> tuple[int, int, int]:
        qkv = s.query_width + 2 * s.kv_width
        attention = s.hidden * (qkv + s.query_width)
        ups = 2 if self.gated else 1
        mlp = (ups + 1) * s.hidden * s.expert_width * max(1, s.experts) + s.experts * s.hidden
        split = qkv * int(self.qkv_bias or s.attention_bias) + s.mlp_bias * ups * s.intermediate
        widths = {"": 0, "head": 2 * s.head_width, "whole": s.query_width + s.kv_width}
        # norms, and biases of outputs
        whole = (self.norms + s.attention_bias + s.mlp_bias) * s.hidden
        return attention + mlp, split, whole + widths[self.query_norms] + self.more


@dataclass(frozen=True)
class Line:
    """A decoder's block, and what its configuration leaves unsaid."""

    block: Decoder = Decoder()
    head_dim: int = 0
    tied: bool = False
    splits_matrices: bool = True  # among tensor ranks, by transformers' own plan
    active_experts: int = 0
    expert_width: str = "intermediate_size"
    window_tokens: int = 0  # that a token sees in layers with a window
    # without `layer_types`, every such layer has none; 0: all have one, None: not known
    full_every: int | None = None


DECODERS = {
    "mistral": Line(window_tokens=4096, full_every=0),
    "qwen2": Line(Decoder(qkv_bias=True)),
    "qwen3": Line(Decoder(query_norms="head"), head_dim=128),
    "gemma": Line(head_dim=256, tied=True),
    "gemma2": Line(Decoder(norms=4), head_dim=256, tied=True, window_tokens=4096, full_every=2),
    "gemma3_text": Line(
        Decoder(norms=4, query_norms="head"),
        head_dim=256,
        tied=True,
        window_tokens=4096,
        full_every=6,
    ),
    "phi3": Line(splits_matrices=False, full_every=0),
    "olmo2": Line(Decoder(query_norms="whole"), splits_matrices=False),
    "smollm3": Line(tied=True),
    "granite": Line(),
    "apertus": Line(Decoder(query_norms="head", gated=False, more=2), splits_matrices=False),
    "cohere": Line(Decoder(norms=1), tied=True),
    "mixtral": Line(splits_matrices=False, active_experts=2, full_every=0),
    "qwen3_moe": Line(
        Decoder(query_norms="head"),
        splits_matrices=False,
        active_experts=8,
        expert_width="moe_intermediate_size",
    ),
    "olmoe": Line(Decoder(query_norms="whole"), splits_matrices=False, active_experts=8),
}


def window_of(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many tokens a token sees in layers with a window, and how many such layers there are.

    (0, 0) without a window, or where it is not known which layers have one.
    """
    line = DECODERS.get(str(config.get("model_type")), Line())
    window = config.get("sliding_window", line.window_tokens)
    kinds = config.get("layer_types")
    if kinds:
        windowed = list(kinds)[:layers].count("sliding_attention")
    elif line.full_every is None:
        windowed = 0
    else:
        windowed = layers - (layers // line.full_every if line.full_every else 0)
    return (int(window), windowed) if window and windowed else (0, 0)


def is_decoder(model_type: str) -> bool | None:
    """Whether transformers has a text decoder of that name; None where it is not installed.

    Its table is read as text: to import it takes seconds.
    """
    installed = importlib.util.find_spec("transformers")
    if installed is None or not installed.submodule_search_locations:
        return None
    table = Path(installed.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    text = table.read_text() if table.is_file() else ""
    named = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b.*?^\)", text, re.DOTALL | re.MULTILINE)
    return f'("{model_type}", ' in named[0] if named else None
