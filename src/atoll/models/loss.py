"""Cross-entropy straight from hidden states, a chunk of tokens at a time.

Legend: N tokens, D hidden width, V vocabulary, C tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor

IGNORED = -100


def chunked_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, chunk_tokens: int
) -> Tensor:
    """The summed cross-entropy in fp32; at no time are more than C x V logits held.

    Labels of -100 do not count. The gradients are computed chunk by chunk in the forward pass,
    so nothing is recomputed (as in Liger-Kernel's fused linear cross-entropy, Hsu et al. 2024).
    """
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    with torch.autocast(device, enabled=False):
        loss: Tensor = _Chunked.apply(hidden_ND, weight_VD, bias_V, labels_N, chunk_tokens)
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        chunk_tokens: int,
    ) -> Tensor:
        learns = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden_ND) if learns else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if learns else None
        grad_bias = (
            torch.zeros_like(bias_V, dtype=torch.float32) if learns and bias_V is not None else None
        )
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits_CV = torch.nn.functional.linear(hidden_ND[rows], weight_VD, bias_V).float()
            chunk_loss, logsumexp_C = _chunk_loss(logits_CV, labels_N[rows])
            loss += chunk_loss
            if grad_hidden is not None and grad_weight is not None:
                grad_CV = _logit_gradient(logits_CV, logsumexp_C, labels_N[rows]).to(
                    weight_VD.dtype
                )
                torch.mm(grad_CV, weight_VD, out=grad_hidden[rows])
                _accumulate(grad_weight, grad_CV, hidden_ND[rows])
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0, dtype=torch.float32)
        ctx.grads = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        scale = grad_outputs[0]
        grads = [
            None if grad is None else grad.mul_(scale.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        ctx.grads = ()
        return (*grads, None, None)


def _chunk_loss(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    logsumexp_C = torch.logsumexp(logits_CV, dim=-1)
    picked_C = logits_CV.gather(1, labels_C.clamp_min(0)[:, None])[:, 0]
    return ((logsumexp_C - picked_C) * (labels_C != IGNORED)).sum(), logsumexp_C


def _logit_gradient(logits_CV: Tensor, logsumexp_C: Tensor, labels_C: Tensor) -> Tensor:
    counted_C1 = (labels_C != IGNORED)[:, None]
    grad_CV = logits_CV.sub_(logsumexp_C[:, None]).exp_()
    grad_CV.scatter_add_(
        1, labels_C.clamp_min(0)[:, None], grad_CV.new_full((grad_CV.shape[0], 1), -1.0)
    )
    return grad_CV.mul_(counted_C1)


def _accumulate(grad_weight: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    if grad_CV.dtype == grad_weight.dtype:
        torch.addmm(grad_weight, grad_CV.T, hidden_CD, out=grad_weight)
    else:
        grad_weight += grad_CV.T @ hidden_CD
