"""Context parallelism: a sample's tokens divided among ranks (Ulysses, and tensor ranks).

Legend: B samples, T tokens of a sample, H heads, D head width, c context ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from atoll.sharding.mesh import Meshes


@dataclass(frozen=True)
class ContextParallelSplit:
    """Contiguous parts: first by context, then each of them by tensor rank."""

    contexts: int
    context_rank: int
    tensors: int
    tensor_rank: int
    attention: "HeadsForTokens | None"

    def own(self, x_BT: Tensor) -> Tensor:
        return self.in_attention(x_BT).chunk(self.tensors, dim=1)[self.tensor_rank]

    def in_attention(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self.contexts, dim=1)[self.context_rank]


class HeadsForTokens:
    """Ulysses: every rank gets all tokens of its part of the heads (Jacobs et al. 2023)."""

    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size = group, size

    def __call__(self, x_BHTD: Tensor) -> Tensor:
        """[B, H, T/c, D] -> [B, H/c, T, D]"""
        batch, heads, tokens, width = x_BHTD.shape
        x = x_BHTD.view(batch, self.size, heads // self.size, tokens, width)
        x = self._all_to_all(x.transpose(0, 1).contiguous())
        # the first axis now tells whose tokens they are
        return x.permute(1, 2, 0, 3, 4).reshape(batch, heads // self.size, -1, width)

    def back(self, x_BTHD: Tensor) -> Tensor:
        """[B, T, H/c, D] -> [B, T/c, H, D]"""
        batch, tokens, heads, width = x_BTHD.shape
        x = x_BTHD.reshape(batch, self.size, tokens // self.size, heads, width)
        x = self._all_to_all(x.transpose(0, 1).contiguous())
        # the first axis now tells whose heads they are
        return x.permute(1, 2, 0, 3, 4).reshape(batch, tokens // self.size, -1, width)

    def _all_to_all(self, x: Tensor) -> Tensor:
        """Send part i of the first axis to rank i; the gradients go the same way back."""
        received: Any = all_to_all_single(torch.empty_like(x), x, group=self.group)
        return torch.as_tensor(received)


def split_tokens(model: Any, meshes: Meshes) -> None:
    """Tell the model which of a sample's tokens are this rank's."""
    axes, rank = meshes.axes, meshes.rank
    if axes.tokens > 1:
        exchange = HeadsForTokens(meshes.context, axes.context) if axes.context > 1 else None
        parts = (axes.context, axes.context_rank(rank), axes.tensor, axes.tensor_rank(rank))
        model.token_split = ContextParallelSplit(*parts, exchange)
