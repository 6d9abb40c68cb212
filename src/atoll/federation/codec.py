"""How the values of an update are written down: fewer bits, and what they cost.

Legend: N values of a stretch that begins at a border of blocks, K of them kept.
Blocks of 64 values share a scale, as in bitsandbytes (Dettmers et al. 2022).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Coding:
    """The parts of an encoded tensor (suffix -> format, values per block) and both ways."""

    parts: dict[str, tuple[torch.dtype, int]]
    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, int], Tensor]
    feedback: float = 1.0  # how much of what it left out is added the next time


def stored_length(per_block: int, count: int) -> int:
    """Stored values of a part for so many values of the tensor; its last block may be short."""
    packed = per_block >= BLOCK // 4
    return -(-count * per_block // BLOCK) if packed else -(-count // BLOCK) * per_block


def _blocks(values_N: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values_N, (0, -len(values_N) % BLOCK))
    return padded.view(-1, BLOCK)


def _encode_int8(values_N: Tensor) -> Parts:
    return _quantised(values_N, 127)


def _quantised(values_N: Tensor, largest: int) -> Parts:
    """Whole steps of each block's scale; bf16 holds any scale to 0.4 %, and the steps fit it."""
    blocks = _blocks(values_N)
    scale = (blocks.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16).float()
    steps = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks))
    whole = steps.round().clamp(-largest, largest).to(torch.int8)
    return {"": whole.flatten()[: len(values_N)], ":scale": scale.flatten().to(torch.bfloat16)}


def _decode_int8(parts: Parts, count: int) -> Tensor:
    blocks = _blocks(parts[""].float())
    return (blocks * parts[":scale"].float()[:, None]).flatten()[:count]


def _encode_int4(values_N: Tensor) -> Parts:
    parts = _quantised(values_N, 7)
    steps = torch.nn.functional.pad(parts[""], (0, len(values_N) % 2)).view(-1, 2)
    low, high = (steps[:, side].to(torch.int16) + 8 for side in (0, 1))
    return {"": (low | (high << 4)).to(torch.uint8), ":scale": parts[":scale"]}


def _decode_int4(parts: Parts, count: int) -> Tensor:
    pairs = parts[""].to(torch.int16)
    steps = torch.stack([pairs & 15, pairs >> 4], dim=1).flatten()[:count] - 8
    return _decode_int8({"": steps, ":scale": parts[":scale"]}, count)


# Two bits: -1.5, -0.5, 0.5 or 1.5 steps; so many times the mean of the magnitudes is the step that
# leaves out least of normal values (Max 1960, "Quantizing for minimum distortion").
STEP_OF_MEAN = 1.248


def _encode_int2(values_N: Tensor) -> Parts:
    blocks = _blocks(values_N)
    counts = _blocks(torch.ones_like(values_N)).sum(1, keepdim=True)
    mean = blocks.abs().sum(1, keepdim=True) / counts
    scale = (STEP_OF_MEAN * mean).to(torch.bfloat16).float()
    steps = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks))
    codes = (steps.floor() + 2).clamp(0, 3).to(torch.uint8).flatten()[: len(values_N)]
    fours = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    packed = fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6
    return {"": packed, ":scale": scale.flatten().to(torch.bfloat16)}


def _decode_int2(parts: Parts, count: int) -> Tensor:
    codes = torch.stack([parts[""] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).flatten()
    return _decode_int8({"": codes[:count] - 1.5, ":scale": parts[":scale"]}, count)


def _as(dtype: torch.dtype) -> Coding:
    return Coding(
        {"": (dtype, BLOCK)},
        lambda values_N: {"": values_N.to(dtype)},
        lambda parts, count: parts[""].float(),
    )


# Of each block the two largest are kept: 3 % of all, found without looking at the whole tensor.
TOP = 2


def _encode_topk(values_N: Tensor) -> Parts:
    blocks = _blocks(values_N)
    places = blocks.abs().topk(TOP, dim=1).indices
    kept = blocks.gather(1, places)
    return {":place": places.flatten().to(torch.uint8), "": kept.flatten().to(torch.bfloat16)}


def _decode_topk(parts: Parts, count: int) -> Tensor:
    blocks = torch.zeros(-(-count // BLOCK), BLOCK)
    places = parts[":place"].view(-1, TOP).long().clamp(max=BLOCK - 1)
    return blocks.scatter_(1, places, parts[""].view(-1, TOP).float()).flatten()[:count]


def _encode_sparse(values_N: Tensor) -> Parts:
    """The two largest again, each in a byte: 6 bits of place, one of size, one of sign."""
    blocks = _blocks(values_N)
    places = blocks.abs().topk(TOP, dim=1).indices
    kept = blocks.gather(1, places)
    scale = kept[:, :1].abs().to(torch.bfloat16)
    is_half = kept.abs() < HALF_BELOW * scale.float()
    code = places | is_half.long() << 6 | (kept < 0).long() << 7
    return {"": code.to(torch.uint8).flatten(), ":scale": scale.flatten()}


def _decode_sparse(parts: Parts, count: int) -> Tensor:
    codes = parts[""].view(-1, TOP).long()
    sizes = (1.0 - 0.5 * (codes >> 6 & 1)) * (1.0 - 2.0 * (codes >> 7))
    blocks = torch.zeros(-(-count // BLOCK), BLOCK)
    kept = sizes * parts[":scale"].float()[:, None]
    return blocks.scatter_(1, codes & BLOCK - 1, kept).flatten()[:count]


# SparseLoCo (Sarfi et al. 2025) forgets a twentieth of what was left out in each round
SPARSE_FEEDBACK = 0.95
HALF_BELOW = 0.75  # of the larger: nearer to a half of it than to the whole

CODECS: dict[str, Coding] = {
    "fp32": _as(torch.float32),
    "bf16": _as(torch.bfloat16),
    "int8": Coding(
        {"": (torch.int8, BLOCK), ":scale": (torch.bfloat16, 1)}, _encode_int8, _decode_int8
    ),
    "int4": Coding(
        {"": (torch.uint8, BLOCK // 2), ":scale": (torch.bfloat16, 1)}, _encode_int4, _decode_int4
    ),
    "int2": Coding(
        {"": (torch.uint8, BLOCK // 4), ":scale": (torch.bfloat16, 1)}, _encode_int2, _decode_int2
    ),
    "sparse": Coding(
        {"": (torch.uint8, TOP), ":scale": (torch.bfloat16, 1)},
        _encode_sparse,
        _decode_sparse,
        SPARSE_FEEDBACK,
    ),
    "topk": Coding(
        {":place": (torch.uint8, TOP), "": (torch.bfloat16, TOP)}, _encode_topk, _decode_topk
    ),
}
