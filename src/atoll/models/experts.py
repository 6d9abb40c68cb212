"""A mixture's experts under autocast, which knows no grouped products.

Legend: N tokens of a rank, K experts of each, D hidden width.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# what transformers calls a token's experts, and their weights, in every family
ROUTED = {"top_k_index", "top_k_weights"}


def autocast_experts(hf: nn.Module) -> None:
    """Have experts compute in autocast's dtype, as linear layers do; without it all stays."""
    for module in hf.modules():
        if inspect.signature(type(module).forward).parameters.keys() >= ROUTED:
            module.forward = partial(_computed, module)


class CastExperts:
    """A block's experts as their family's code sees them: with parameters in another dtype."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self.experts = experts
        self.parts = {n: p.to(dtype) for n, p in experts.named_parameters(recurse=False)}

    def __getattr__(self, name: str) -> Any:
        return self.parts[name] if name in self.parts else getattr(self.experts, name)


def _computed(experts: Any, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """[N, D] -> [N, D], in the dtype of what came; gradients reach the parameters in theirs."""
    computed: Tensor
    device = x_ND.device.type
    if not torch.is_autocast_enabled(device):
        computed = type(experts).forward(experts, x_ND, experts_NK, weights_NK)
        return computed
    dtype = torch.get_autocast_dtype(device)
    cast: Any = CastExperts(experts, dtype)
    computed = type(experts).forward(cast, x_ND.to(dtype), experts_NK, weights_NK)
    return computed.to(x_ND.dtype)
