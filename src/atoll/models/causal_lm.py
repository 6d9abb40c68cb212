"""A Hugging Face causal language model whose forward pass ends in the loss, not in logits."""

import sys
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.data.batch import Batch
from atoll.models.attention import has_varlen_kernel
from atoll.models.loss import IGNORED, chunked_cross_entropy
from atoll.models.parts import Parts


class TokenSplit(Protocol):
    """How a sample's tokens are divided among ranks that work on it together."""

    attention: Any  # what exchanges heads for tokens around an attention call; None: nothing

    def own(self, x_BT: Tensor) -> Tensor:
        """This rank's part of the tokens."""
        ...

    def in_attention(self, x_BT: Tensor) -> Tensor:
        """The part that this rank's attention sees."""
        ...


class CausalLM(nn.Module):
    """Tokens in, summed loss out; the whole of it is the root of every sharding layout.

    The Hugging Face model lives under `hf`, so a parameter's own name follows "hf.". `token_split`
    and `stages` are set by layouts that divide tokens or layers among ranks.
    """

    def __init__(
        self,
        hf: nn.Module,
        parts: Parts,
        loss_chunk_tokens: int,
        z_loss: float = 0.0,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.parts = parts
        self.loss_chunk_tokens = loss_chunk_tokens
        self.z_loss = z_loss
        self.compiled = compiled
        self.token_split: TokenSplit | None = None
        self.stages: Any = None

    def forward(
        self,
        batch: Batch,
        compute_dtype: torch.dtype,
        hidden_BTD: Tensor | None = None,
        stage: int | None = None,
    ) -> Tensor:
        """The cross-entropy summed over the batch's targets on this rank, fp32.

        In a pipeline: of stage `stage`, from the hidden states of the one before; all stages but
        the last return hidden states.
        """
        if self.training and batch.seed is not None:
            # a rank's stages draw each its own
            torch.manual_seed(batch.seed + (0 if stage is None else stage // self.stages.ranks))
        if stage is None:
            output = self._output(batch, compute_dtype, None)
            return self._loss(output.last_hidden_state, batch) + self._balance_loss(output, batch)
        with self.stages.stage_view(self, stage):
            hidden_BTD = self._output(batch, compute_dtype, hidden_BTD).last_hidden_state
            return self._loss(hidden_BTD, batch) if self.stages.is_last(stage) else hidden_BTD

    def _output(self, batch: Batch, dtype: torch.dtype, hidden_BTD: Tensor | None) -> Any:
        tokens_BT, positions_BT, split = batch.tokens_BT, batch.positions_BT, self.token_split
        if split is not None:
            tokens_BT = split.own(tokens_BT)
            # positions are added to a rank's own tokens, or turn the queries of its attention
            part = split.in_attention if self.parts.positions is None else split.own
            positions_BT = part(positions_BT)
        inputs = {"input_ids": tokens_BT} if hidden_BTD is None else {"inputs_embeds": hidden_BTD}
        more = {} if split is None or not split.attention else {"heads_for_tokens": split.attention}
        backbone = self.hf.get_submodule(self.parts.backbone)
        more |= inputs | {"position_ids": positions_BT}
        if self._balances:
            more["output_router_logits"] = True
        return backbone_output(backbone, self, batch, dtype, more)

    def _loss(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        head = self.hf.get_submodule(self.parts.head)
        return chunked_cross_entropy(
            self.before_head(hidden_BTD).flatten(0, 1),
            head.weight,
            head.bias,
            self.own_labels(batch).flatten(),
            self.loss_chunk_tokens,
            self.softcap,
            self.z_loss,
            self.compiled and hidden_BTD.is_cuda,  # on a processor there is nothing to gain
        )

    def before_head(self, hidden_BTD: Tensor) -> Tensor:
        """What the head multiplies: with the family's own layers, and its scale of logits."""
        if self.parts.before_head is not None:
            hidden_BTD = self.hf.get_submodule(self.parts.before_head)(hidden_BTD)
        scale = logit_scale(self.hf.config)
        return hidden_BTD if scale == 1.0 else hidden_BTD * scale

    @property
    def softcap(self) -> float | None:
        """How far a family's logits can go."""
        return getattr(self.hf.config, "final_logit_softcapping", None)

    @property
    def _balances(self) -> bool:
        return self.training and balances_experts(self.hf.config)

    def _balance_loss(self, output: Any, batch: Batch) -> Tensor | float:
        """What a mixture's router is told for uneven work, for each term as transformers' mean.

        Of all tokens of the microbatch on this rank, as in transformers' Trainer.
        """
        if not self._balances:
            return 0.0
        hf: Any = self.hf
        loss_of = vars(sys.modules[type(hf).__module__])["load_balancing_loss_func"]
        loss = loss_of(output.router_logits, hf.num_experts, hf.num_experts_per_tok, None)
        return torch.as_tensor(loss * hf.router_aux_loss_coef * self._terms(batch))

    def _terms(self, batch: Batch) -> Tensor | int:
        """How many losses this rank's is the sum of."""
        return (self.own_labels(batch) != IGNORED).sum()

    def own_labels(self, batch: Batch) -> Tensor:
        """The targets whose loss this rank computes."""
        split = self.token_split
        return split.own(batch.labels_BT) if split else batch.labels_BT


def logit_scale(config: Any) -> float:
    """What a family multiplies its logits with (Granite divides, Cohere multiplies)."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    return float(factor) / float(divisor)


def balances_experts(config: Any) -> bool:
    """Whether the loss has a part for the balance of experts: as in transformers, where asked."""
    coefficient = getattr(config, "router_aux_loss_coef", None) or 0.0
    return bool(getattr(config, "output_router_logits", False)) and coefficient > 0


def backbone_output(
    backbone: nn.Module, model: Any, batch: Batch, dtype: torch.dtype, more: dict[str, Any]
) -> Any:
    """What the backbone says of a batch; `more` goes with the call or takes the place of inputs."""
    inputs = {"position_ids": batch.positions_BT}
    if "inputs_embeds" not in more:
        inputs["input_ids"] = batch.tokens_BT
    together = in_one_call(model.hf.config, batch.tokens_BT.device, dtype, model.training)
    return backbone(use_cache=False, **(inputs | _segments(batch, together) | more))


def in_one_call(config: Any, device: torch.device, dtype: torch.dtype, training: bool) -> bool:
    """Whether one call serves all documents of a batch; else each has its own, in no graph."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # which no kernel does
    dropout = _attention_dropout(config) if training else 0.0
    return not capped and has_varlen_kernel(device, dtype, dropout)


def _segments(batch: Batch, together: bool) -> dict[str, Any]:
    samples = batch.tokens_BT.shape[0]
    if len(batch.segment_lengths) == samples:
        return {}
    if together:
        return {"segment_ends": batch.segment_ends}
    return {"segment_lengths": batch.segment_lengths}


def _attention_dropout(config: Any) -> float:
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)
