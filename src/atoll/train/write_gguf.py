"""A GGUF file, as llama.cpp reads it, from an export's safetensors: one tensor at a time.

Names and layout: the `gguf` package, of llama.cpp's authors; what each architecture's file holds:
llama.cpp's convert_hf_to_gguf.py.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from atoll import run_dir
from atoll.models.safetensor_files import weight_files
from atoll.plan.gguf_architectures import FULL, WINDOW, Architecture, check_computed_alike, ropes
from atoll.train.gguf_vocabulary import read_vocabulary

EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.*)$")
ROUTER = "ffn_gate_inp"
Q8_BLOCK = 32


@dataclass(frozen=True)
class Planned:
    """A tensor of the file: what it is made of, and how it is stored."""

    name: str
    stored: tuple[str, ...]  # one; of experts, each one's
    shape: tuple[int, ...]
    format: str


def file_in(folder: Path, format: str) -> Path:
    return folder / f"model-{format}.gguf"


def check_writable(config: dict[str, Any], tokenizer: Path) -> None:
    """Refuse, before anything is trained, a model or tokenizer that has no GGUF.

    Raises `UserError`.
    """
    check_computed_alike(config)
    read_vocabulary(tokenizer)


def write_gguf(folder: Path, format: str, name: str) -> Path:
    """Write the GGUF file of a Hugging Face folder into it, fsynced; its path.

    format: of matrices (f32, f16, bf16, q8_0); vectors and routers are fp32, and so is what
    llama.cpp computes of them. A matrix whose rows are no multiple of 32 is f16 in a q8_0 file.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    config = json.loads((folder / "config.json").read_text())
    architecture, path = check_computed_alike(config), file_in(folder, format)
    tensors = _Stored(folder)
    planned = list(_planned(tensors, architecture, config["num_hidden_layers"], format))
    writer: Any = GGUFWriter(path, architecture.name)
    _add_settings(writer, config, architecture, format, name)
    _add_vocabulary(writer, folder, config["vocab_size"])
    factors = _rope_factors(folder)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for each in planned:
        kind = GGMLQuantizationType[each.format.upper()]
        bytes_ = _bytes_of(each.shape, each.format)
        writer.add_tensor_info(each.name, each.shape, None, bytes_, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for each in planned:
        writer.write_tensor_data(_array(_made(tensors, each, architecture, config), each.format))
    writer.close()
    run_dir.sync_file(path)
    return path


class _Stored:
    """The tensors of a folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.files = weight_files(folder)

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name).float()
        return tensor


def _planned(
    tensors: _Stored, architecture: Architecture, layers: int, format: str
) -> Iterator[Planned]:
    """All tensors by llama.cpp's names; the experts of a block are one."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = get_tensor_name_map(arch, layers)
    together: dict[str, list[str]] = {}
    for stored in sorted(tensors.files, key=_natural):
        together.setdefault(EXPERT.sub(r"\1.\3", stored), []).append(stored)
    for merged, parts in together.items():
        name = names.get_name(merged, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"{merged} has no name in GGUF"
        shape = tensors.shape(parts[0])
        own = "f32" if len(shape) == 1 or ROUTER in name else format
        if own == "q8_0" and shape[-1] % Q8_BLOCK:
            own = "f16"
        of_experts = EXPERT.match(parts[0]) is not None
        yield Planned(name, tuple(parts), (len(parts), *shape) if of_experts else shape, own)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def _made(
    tensors: _Stored, planned: Planned, architecture: Architecture, config: dict[str, Any]
) -> Tensor:
    if len(planned.shape) == 3:
        return torch.stack([tensors.read(name) for name in planned.stored])
    tensor = tensors.read(planned.stored[0])
    if architecture.norm_offset and planned.name.endswith("norm.weight"):
        return tensor + architecture.norm_offset
    heads = config["num_attention_heads"]
    turned = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    part = planned.name.split(".")[-2]
    if architecture.turns_rotary and part in turned:
        return _in_pairs(tensor, turned[part])
    return tensor


def _in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Rows i and i + half of each head, which turn together, beside each other."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def _bytes_of(shape: tuple[int, ...], format: str) -> int:
    # a block of q8_0 is 32 numbers of a byte, and their scale
    per_block = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34}[format]
    return math.prod(shape) * per_block // Q8_BLOCK


def _array(tensor: Tensor, format: str) -> Any:
    from gguf import GGMLQuantizationType, quantize

    contiguous = tensor.contiguous()
    make: dict[str, Callable[[], Any]] = {
        "f32": contiguous.numpy,
        "f16": lambda: contiguous.half().numpy(),
        "bf16": lambda: contiguous.bfloat16().view(torch.uint8).numpy(),
        "q8_0": lambda: quantize(contiguous.numpy(), GGMLQuantizationType.Q8_0),
    }
    return make[format]()


def _add_settings(
    writer: Any, config: dict[str, Any], architecture: Architecture, format: str, name: str
) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    kind = "ALL_F32" if format == "f32" else f"MOSTLY_{format.upper()}"
    heads, window = config["num_attention_heads"], config.get("sliding_window")
    width = config.get("head_dim") or config["hidden_size"] // heads
    positions = config["max_position_embeddings"]
    has_windows = architecture.name.startswith("gemma")
    writer.add_name(name)
    writer.add_file_type(LlamaFileType[kind])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    # llama.cpp's llama has no windows: up to one window, all positions are the same
    writer.add_context_length(positions if has_windows or not window else min(positions, window))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if has_windows and window:
        writer.add_sliding_window(window)
    _add_positions(writer, config, width)
    optional = {
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    for key, add in optional.items():
        if config.get(key) is not None:
            add(config[key])


def _add_positions(writer: Any, config: dict[str, Any], width: int) -> None:
    from gguf import RopeScalingType

    every = ropes(config)
    rope = every[FULL]
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(_theta(config))
    if WINDOW in every:
        writer.add_rope_freq_base_swa(every[WINDOW]["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _theta(config: dict[str, Any]) -> float:
    return float(ropes(config)[FULL].get("rope_theta", config.get("rope_theta", 1e4)))


def _rope_factors(folder: Path) -> Any:
    """What each frequency is divided by in Llama 3's scaled positions; else None."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if ropes(config.to_dict())[FULL].get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    exponents = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    return (_theta(config.to_dict()) ** -exponents / scaled).numpy()


def _add_vocabulary(writer: Any, folder: Path, vocab_size: int) -> None:
    from gguf import TokenType
    from transformers import AutoTokenizer

    words = read_vocabulary(folder)
    missing = range(len(words.tokens), vocab_size)  # rows of the embeddings without a token
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.cut)
    writer.add_token_list([*words.tokens, *(f"[PAD{id}]" for id in missing)][:vocab_size])
    kinds = [*words.kinds, *(int(TokenType.UNUSED) for _ in missing)]
    writer.add_token_types(kinds[:vocab_size])
    if words.merges:
        writer.add_token_merges(words.merges)
    if words.scores:
        lowest = min(words.scores)
        writer.add_token_scores([*words.scores, *(lowest for _ in missing)][:vocab_size])
        writer.add_add_space_prefix(words.puts_space)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for kind in ("bos", "eos", "unk", "pad", "mask"):
        if (id := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(id)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(
        tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    )
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
