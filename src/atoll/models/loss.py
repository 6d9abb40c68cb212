"""Cross-entropy straight from hidden states, a chunk of tokens at a time.

Legend: N tokens, D hidden width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    chunk_tokens: int,
    softcap: float | None = None,
    z_loss: float = 0.0,
    compiled: bool = False,
) -> Tensor:
    """The summed cross-entropy in fp32; at no time are more than C x V logits held.

    Labels of -100 do not count. softcap: logits x become softcap * tanh(x / softcap) (Gemma 2).
    z_loss: times the squared log of each target's normaliser, which pulls it to 1 (PaLM, Chowdhery
    et al. 2022); it is in the gradients alone, so that losses stay cross-entropies. The
    gradients are computed chunk by chunk in the forward pass, so nothing is recomputed (as in
    Liger-Kernel's fused linear cross-entropy, Hsu et al. 2024). compiled: torch.compile makes
    one kernel of what is done to a chunk's logits between the products.
    """
    if not torch.is_grad_enabled():
        # in a Function a parameter asks for its gradient all the same
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
        bias_V = None if bias_V is None else bias_V.detach()
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    with torch.autocast(device, enabled=False):
        terms = (chunk_tokens, softcap, z_loss, compiled)
        loss: Tensor = _Chunked.apply(hidden_ND, weight_VD, bias_V, labels_N, *terms)
    return loss


def chunked_log_probabilities(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    chunk_tokens: int,
    softcap: float | None = None,
) -> Tensor:
    """The log-probability of each label in fp32, [N], and 0 where it is -100.

    No more than C x V logits are held: those of a chunk are computed again in the backward pass.
    softcap: as of `chunked_cross_entropy`.
    """
    chunks = [
        checkpoint(
            _log_probabilities,
            hidden_ND[start : start + chunk_tokens],
            weight_VD,
            bias_V,
            labels_N[start : start + chunk_tokens],
            softcap,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, hidden_ND.shape[0], chunk_tokens)
    ]
    return torch.cat(chunks)


def _log_probabilities(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    softcap: float | None,
) -> Tensor:
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float()
    if softcap is not None:
        logits_CV = softcap * torch.tanh(logits_CV / softcap)
    labelled_C = logits_CV.gather(1, labels_C.clamp_min(0)[:, None])[:, 0]
    return (labelled_C - logits_CV.logsumexp(-1)) * (labels_C != IGNORED)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        chunk_tokens: int,
        softcap: float | None,
        z_loss: float,
        compiled: bool,
    ) -> Tensor:
        of_logits = _compiled() if compiled else _of_logits
        learns, weight_learns, bias_learns = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_ND) if learns else None
        # as large as the head: not made where that stays as it is
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if weight_learns else None
        grad_bias = None
        if bias_learns and bias_V is not None:
            grad_bias = torch.zeros_like(bias_V, dtype=torch.float32)[:, None]
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            counted_C1 = (labels_N[rows] != IGNORED)[:, None]
            targets_C1 = labels_N[rows].clamp_min(0)[:, None]
            logits_CV = F.linear(hidden_ND[rows], weight_VD, bias_V)
            learns_any = any(ctx.needs_input_grad)
            logp_C1, grad_CV = of_logits(logits_CV, targets_C1, softcap, z_loss, learns_any)
            loss -= (logp_C1 * counted_C1).sum()
            if grad_CV is None:
                continue
            # ignored rows are zeroed in the thin factors, which spares a pass over C x V
            if grad_hidden is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden[rows])
                grad_hidden[rows] *= counted_C1
            if grad_weight is not None:
                _add_product(grad_weight, grad_CV.T, hidden_ND[rows] * counted_C1)
            if grad_bias is not None:
                _add_product(grad_bias, grad_CV.T, counted_C1.to(grad_CV.dtype))
        ctx.grads = (grad_hidden, grad_weight, None if grad_bias is None else grad_bias[:, 0])
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        scale = grad_outputs[0].float()[None]  # with an axis, it multiplies in fp32 and not in bf16
        grads = [
            None if grad is None else grad.mul_(scale).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        ctx.grads = ()
        return (*grads, None, None, None, None, None)


def _of_logits(
    logits_CV: Tensor, targets_C1: Tensor, softcap: float | None, z_loss: float, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """The log-probability of each target in fp32, and the loss' gradient in the logits' dtype."""
    dtype, share_CV = logits_CV.dtype, None
    if softcap is not None:
        share_CV = torch.tanh(logits_CV.float() / softcap)
        logits_CV = share_CV * softcap
    logp_CV = torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    logp_C1 = logp_CV.gather(1, targets_C1)
    if not learns:
        return logp_C1, None
    log_z_C1 = logits_CV[:, :1].float() - logp_CV[:, :1] if z_loss else None
    grad_CV = logp_CV.exp_()
    if log_z_C1 is not None:
        grad_CV *= 1 + 2 * z_loss * log_z_C1
    if torch.compiler.is_compiling():  # a scatter would not go into one kernel with the rest
        is_target_CV = torch.arange(grad_CV.shape[1], device=grad_CV.device) == targets_C1
        grad_CV -= is_target_CV.float()
    else:
        grad_CV.scatter_add_(1, targets_C1, grad_CV.new_full(targets_C1.shape, -1.0))
    if share_CV is not None:
        grad_CV *= 1 - share_CV.square_()
    return logp_C1, grad_CV.to(dtype)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(_of_logits)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total += a @ b
