"""Attention that no kernel of torch computes whole: some rows of scores at a time.

Legend: B batch, H heads, T tokens, R rows (queries) of a chunk, K keys that they see, D head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.errors import UserError

ROWS = 512


def attend_by_rows(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, kernel: Any) -> Tensor:
    """Causal attention with a sliding window, with soft-capped scores, or both: [B, H, T, D].

    Never more than R x K scores of a head exist at once. The window is transformers': a token sees
    itself and the window - 1 before it. Soft caps: Gemma 2 (Riviere et al. 2024).
    """
    if not kernel.causal:
        raise UserError(
            "this model looks both ways through a sliding window or capped scores, which attention "
            "of packed documents does not compute",
            "choose a model of another family",
        )
    tokens = q_BHTD.shape[2]
    rows = max(kernel.window or ROWS, 128)
    parts = []
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        first = 0 if kernel.window is None else max(0, start - kernel.window + 1)
        hidden_RK = _hidden(start, first, stop, kernel.window, q_BHTD.device)
        k, v = (x[:, :, first:stop] for x in (k_BHTD, v_BHTD))
        parts.append(_chunk(q_BHTD[:, :, start:stop], k, v, hidden_RK, kernel))
    return torch.cat(parts, dim=2)


def _hidden(start: int, first: int, stop: int, window: int | None, device: Any) -> Tensor:
    """Which keys (from `first`) each query (from `start`) does not see."""
    distance_RK = (
        torch.arange(start, stop, device=device)[:, None]
        - torch.arange(first, stop, device=device)[None]
    )
    hidden_RK = distance_RK < 0
    return hidden_RK if window is None else hidden_RK | (distance_RK >= window)


def _chunk(q: Tensor, k: Tensor, v: Tensor, hidden_RK: Tensor, kernel: Any) -> Tensor:
    shared = k.shape[1] != q.shape[1]
    if kernel.softcap is None:
        more = {"scale": kernel.scaling, "enable_gqa": shared}
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=~hidden_RK, dropout_p=kernel.dropout, **more
        )
    if shared:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if kernel.scaling is None else kernel.scaling
    scores_BHRK = (q @ k.transpose(2, 3)) * scale
    scores_BHRK = torch.tanh(scores_BHRK / kernel.softcap) * kernel.softcap
    scores_BHRK = scores_BHRK.masked_fill(hidden_RK, float("-inf"))
    weights_BHRK = torch.softmax(scores_BHRK, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights_BHRK, kernel.dropout) @ v
