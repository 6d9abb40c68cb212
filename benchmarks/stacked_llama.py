"""Small Llamas that learn side by side: every weight is a stack, with a model's own in each layer.

As transformers' Llama, and as torch's AdamW behind a clipped gradient, which the atlas' test holds
them to.
Legend: R models, B samples, T tokens, N = B*T, V words, D width.
"""

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from atlas_rounds import CLIP_NORM
from atlas_texts import ANSWER_TOKENS
from torch import Tensor

EVALUATED = 64  # windows of each model at a time
Stack = dict[str, Tensor]


def losses(weights: Stack, windows_RBT: Tensor, config: Any) -> Tensor:
    """The mean loss of each model's batch, [R]."""
    models, labels_RN = len(windows_RBT), windows_RBT[:, :, 1:].flatten(1)
    logits_RNV = logits(weights, windows_RBT[:, :, :-1], config)
    loss_N = F.cross_entropy(logits_RNV.flatten(0, 1), labels_RN.flatten(), reduction="none")
    return loss_N.view(models, -1).mean(1)


def logits(weights: Stack, tokens_RBT: Tensor, config: Any) -> Tensor:
    """A Llama's, written for stacks: [R, N, V]."""
    models, samples, tokens = tokens_RBT.shape
    heads, width = config.num_attention_heads, config.head_dim
    words = weights["hf.model.embed_tokens.weight"]
    firsts_R1 = torch.arange(models, device=words.device)[:, None] * words.shape[1]
    x_RND = F.embedding(tokens_RBT.flatten(1) + firsts_R1, words.flatten(0, 1))
    base = config.rope_parameters["rope_theta"]
    cos_TD, sin_TD = turns(tokens, width, base, words.device)
    later_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=words.device).triu(1)

    def linear(name: str, x_RND: Tensor) -> Tensor:
        return torch.bmm(x_RND, weights[f"hf.{name}.weight"].mT)

    def norm(name: str, x_RND: Tensor) -> Tensor:
        scale_RN1 = torch.rsqrt(x_RND.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return x_RND * scale_RN1 * weights[f"hf.{name}.weight"][:, None]

    def by_head(x_RND: Tensor) -> Tensor:
        return x_RND.view(models * samples, tokens, heads, width).transpose(1, 2)

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos_TD + torch.cat([-right, left], dim=-1) * sin_TD

    for layer in (f"model.layers.{number}" for number in range(config.num_hidden_layers)):
        h = norm(f"{layer}.input_layernorm", x_RND)
        q, k, v = (by_head(linear(f"{layer}.self_attn.{n}_proj", h)) for n in "qkv")
        scores = turned(q) @ turned(k).mT / sqrt(width)
        mixed = scores.masked_fill(later_TT, -torch.inf).softmax(-1) @ v
        x_RND = x_RND + linear(f"{layer}.self_attn.o_proj", mixed.transpose(1, 2).reshape_as(x_RND))
        h = norm(f"{layer}.post_attention_layernorm", x_RND)
        gate, up = (linear(f"{layer}.mlp.{n}_proj", h) for n in ("gate", "up"))
        x_RND = x_RND + linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)
    return linear("lm_head", norm("model.norm", x_RND))


def turns(tokens: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary positions (Su et al. 2021), two times half the width: cosines and sines."""
    powers = torch.arange(0, width, 2, device=device).float() / width
    angles = torch.arange(tokens, device=device)[:, None] / base**powers
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


@torch.no_grad()
def adamw(
    weights: Stack,
    gradients: Stack,
    means: Stack,
    squares: Stack,
    rates_R: Tensor,
    step: Tensor,
    constants: tuple[float, float, float, float],
) -> None:
    """Clip each model's gradient and step as torch's AdamW; vectors are not decayed."""
    beta1, beta2, epsilon, decay = constants
    norms_R = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()  # type: ignore
    clip_R = (CLIP_NORM / (norms_R + 1e-6)).clamp(max=1.0)
    rise, spread = 1 - beta1**step, (1 - beta2**step).sqrt()
    for name, weight in weights.items():
        shape = (-1, *[1] * (weight.ndim - 1))
        gradient, rate = gradients[name] * clip_R.view(shape), rates_R.view(shape)
        if weight.ndim > 2:
            weight.mul_(1 - rate * decay)
        mean = means[name].lerp_(gradient, 1 - beta1)
        square = squares[name].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.sub_(rate / rise * mean / (square.sqrt() / spread + epsilon))


def mean_losses(weights: Stack, windows_BT: Tensor, config: Any) -> Tensor:
    models, device = _models_of(weights)
    parts = windows_BT.to(device).split(EVALUATED)
    means = [losses(weights, part.expand(models, *part.shape), config) for part in parts]
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64, device=device)
    return torch.stack(means).double().mul(counts[:, None]).sum(0) / counts.sum()


def shares_answered(weights: Stack, questions_QAT: Tensor, config: Any) -> Tensor:
    models, device = _models_of(weights)
    scores = []
    for part in questions_QAT.flatten(0, 1).to(device).split(EVALUATED):
        words = logits(weights, part[:, :-1].expand(models, *part[:, :-1].shape), config)
        logp = words.log_softmax(-1).unflatten(1, (len(part), -1))
        right = part[:, 1:, None].expand(models, len(part), part.shape[1] - 1, 1)
        scores.append(logp.gather(3, right)[:, :, -ANSWER_TOKENS:, 0].sum(2))
    best_RQ = torch.cat(scores, 1).unflatten(1, questions_QAT.shape[:2]).argmax(2)
    return (best_RQ == 0).double().mean(1)


def _models_of(weights: Stack) -> tuple[int, torch.device]:
    some = next(iter(weights.values()))
    return len(some), some.device
