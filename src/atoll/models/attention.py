"""Attention that keeps packed documents apart without ever building a mask.

Legend: B batch, H heads, T tokens of a sample, N = B*T tokens, D head width, S segments.
"""

import importlib
import inspect
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import UserError
from atoll.models.attention_rows import attend_by_rows

NAME = "atoll_packed"
# Up to here torch's kernel was faster in fp32 than in bf16 (benchmarks/short_attention.py).
SHORT_TOKENS = 256
# All that computes attention, in any torch from 2.10 on; the last is the kernel of packed samples.
OPERATORS = (
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
)


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers.

    No mask function goes with the name, so transformers builds none (masking_utils.py).
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def has_varlen_kernel(device: torch.device, dtype: torch.dtype, dropout: float) -> bool:
    """Whether one kernel call can serve all segments (flash attention needs half precision)."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and dropout == 0.0


def kept_operators() -> list[Any]:
    """Whose results selective activation checkpointing keeps, as far as this torch has them."""
    with suppress(ImportError):
        importlib.import_module("torch.nn.attention.varlen")  # registers its operator
    pairs = (name.split(".") for name in OPERATORS)
    packets = [getattr(getattr(torch.ops, library), name, None) for library, name in pairs]
    return [packet.default for packet in packets if packet is not None]


@dataclass(frozen=True)
class Kernel:
    """What every call of one attention module has in common."""

    scaling: float | None
    dropout: float
    causal: bool
    window: int | None = None  # a token sees itself and those before it: so many in all
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)

    def by_rows(self, tokens: int) -> bool:
        """Whether torch's kernel alone does not compute it."""
        return self.softcap is not None or (self.window is not None and self.window < tokens)


def packed_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segment_ends: Tensor | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    heads_for_tokens: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,  # from here on what says nothing that matters here
    use_cache: bool = False,
    past_key_values: Any = None,
    output_router_logits: bool = False,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment; without segments, inside each sample.

    What a family's attention asks for beyond these arguments is refused. segment_ends: int32 [S+1]
    on the device, cumulative over the N flattened tokens, for the kernel; segment_lengths: the same
    on the host, for one call a segment. heads_for_tokens: where ranks share a sample, gives each of
    them all tokens of some heads, and back. Returns [B, T, H, D].
    """
    assert attention_mask is None, "documents are kept apart by segments, not by masks"
    _refuse_unknown(module, unknown)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    kernel = Kernel(scaling, dropout, causal, sliding_window, softcap)
    device = query_BHTD.device.type
    # not what autocast would give the kernel, where positions made queries and keys fp32 again
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else query_BHTD.dtype
    q, k, v = query_BHTD, key_BHTD, value_BHTD
    if heads_for_tokens is not None:
        q, k, v = (heads_for_tokens(x.to(dtype)) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        if segment_lengths is not None:
            out_BTHD = _by_segment(q, k, v, segment_lengths, kernel)
        elif segment_ends is not None:
            out_BTHD = _varlen(q, k, v, segment_ends, kernel)
        else:
            out_BTHD = _whole(q, k, v, kernel)
    return (out_BTHD if heads_for_tokens is None else heads_for_tokens.back(out_BTHD)), None


def _refuse_unknown(module: nn.Module, unknown: dict[str, Any]) -> None:
    asked = sorted(name for name, value in unknown.items() if value is not None)
    if asked:
        raise UserError(
            f"{type(module).__name__} asks its attention for {', '.join(asked)}, which attention "
            "of packed documents does not compute",
            "choose a model of another family",
        )


def _computed(x: Tensor, any_length: bool) -> Tensor:
    """In fp32 on processors: short samples as the faster, documents as of any length.

    oneDNN compiles a kernel for each shape of a product in half precision and keeps 1,024 of
    them, up to 1 MB each. Long documents pay for that memory with time.
    """
    if x.device.type == "cpu" and x.dtype.itemsize == 2:
        return x.float() if any_length or x.shape[2] <= SHORT_TOKENS else x
    return x


def _flat(x_BHTD: Tensor) -> Tensor:
    """[B, H, T, D] -> [N, H, D]"""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def _varlen(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, ends: Tensor, kernel: Kernel) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, tokens, width = q_BHTD.shape
    q, k, v = (_flat(x) for x in (q_BHTD, k_BHTD, v_BHTD))
    if kernel.scaling is not None and kernel.scaling != width**-0.5:
        q = q * (kernel.scaling * width**0.5)  # the kernel of torch 2.10 takes no scale
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    causal: dict[str, Any] = {"is_causal": kernel.causal}
    before = -1 if kernel.window is None else kernel.window - 1
    if "window_size" in inspect.signature(varlen_attn).parameters:
        causal = {"window_size": (before, 0) if kernel.causal else (-1, -1)}
    elif kernel.window is not None:
        raise UserError(
            f"the kernel of this torch ({torch.__version__}) knows no sliding window",
            "use an image with a newer torch (2.11 or later)",
        )
    out_NHD: Any = varlen_attn(q, k, v, ends, ends, tokens, tokens, **causal)
    return torch.as_tensor(out_NHD).view(batch, tokens, heads, width)


def _whole(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, kernel: Kernel) -> Tensor:
    q, k, v = (_computed(x, any_length=False) for x in (q_BHTD, k_BHTD, v_BHTD))
    return _sdpa(q, k, v, kernel).transpose(1, 2).to(q_BHTD.dtype)


@torch.compiler.disable
def _by_segment(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, lengths: tuple[int, ...], kernel: Kernel
) -> Tensor:
    """Samples that are one document in one call, of the others a call for each segment."""
    batch, _, tokens, _ = q_BHTD.shape
    ends = [*accumulate(lengths)]
    fills = [n == tokens and end % tokens == 0 for n, end in zip(lengths, ends, strict=True)]
    whole = [end // tokens - 1 for end in compress(ends, fills)]
    if not whole:
        return _each_segment(q_BHTD, k_BHTD, v_BHTD, lengths, kernel)
    cut = sorted({*range(batch)}.difference(whole))
    order = torch.tensor([*whole, *cut], device=q_BHTD.device)
    inputs = (q_BHTD, k_BHTD, v_BHTD)
    q, k, v = (x.index_select(0, order[: len(whole)]) for x in inputs)
    outputs = [_whole(q, k, v, kernel)]
    if cut:
        shorter = tuple(n for n, fill in zip(lengths, fills, strict=True) if not fill)
        q, k, v = (x.index_select(0, order[len(whole) :]) for x in inputs)
        outputs.append(_each_segment(q, k, v, shorter, kernel))
    return torch.cat(outputs).index_select(0, order.argsort())


def _each_segment(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, lengths: tuple[int, ...], kernel: Kernel
) -> Tensor:
    batch, heads, tokens, width = q_BHTD.shape
    # split, not slices: its backward is one concatenation instead of S zero-filled buffers.
    q_parts, k_parts, v_parts = (
        _flat(_computed(x, any_length=True)).transpose(0, 1).split(lengths, dim=1)
        for x in (q_BHTD, k_BHTD, v_BHTD)
    )
    outputs = [
        _sdpa(q[None], k[None], v[None], kernel)[0].transpose(0, 1)
        for q, k, v in zip(q_parts, k_parts, v_parts, strict=True)
    ]
    return torch.cat(outputs).view(batch, tokens, heads, width).to(q_BHTD.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    if kernel.by_rows(q.shape[2]):
        return attend_by_rows(q, k, v, kernel)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        dropout_p=kernel.dropout,
        is_causal=kernel.causal,
        scale=kernel.scaling,
        enable_gqa=k.shape[1] != q.shape[1],
    )
