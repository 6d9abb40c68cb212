"""A Hugging Face causal language model whose forward pass ends in the loss, not in logits."""

from typing import Any

import torch
from torch import Tensor, nn

from atoll.data.batch import Batch
from atoll.models.attention import has_varlen_kernel
from atoll.models.loss import chunked_cross_entropy
from atoll.models.parts import Parts


class CausalLM(nn.Module):
    """Tokens in, summed loss out; the whole of it is the root of every sharding layout.

    The Hugging Face model lives under `hf`, so a parameter's own name follows "hf.".
    """

    def __init__(self, hf: nn.Module, parts: Parts, loss_chunk_tokens: int) -> None:
        super().__init__()
        self.hf = hf
        self.parts = parts
        self.loss_chunk_tokens = loss_chunk_tokens

    def forward(self, batch: Batch, compute_dtype: torch.dtype) -> Tensor:
        """The cross-entropy summed over the batch's targets, fp32."""
        backbone = self.hf.get_submodule(self.parts.backbone)
        hidden_BTD = backbone(
            input_ids=batch.tokens_BT,
            position_ids=batch.positions_BT,
            use_cache=False,
            **_segments(
                batch, compute_dtype, _attention_dropout(self.hf) if self.training else 0.0
            ),
        ).last_hidden_state
        if self.parts.before_head is not None:
            hidden_BTD = self.hf.get_submodule(self.parts.before_head)(hidden_BTD)
        head = self.hf.get_submodule(self.parts.head)
        return chunked_cross_entropy(
            hidden_BTD.flatten(0, 1),
            head.weight,
            head.bias,
            batch.labels_BT.flatten(),
            self.loss_chunk_tokens,
        )


def _segments(batch: Batch, dtype: torch.dtype, dropout: float) -> dict[str, Any]:
    samples = batch.tokens_BT.shape[0]
    if len(batch.segment_lengths) == samples:
        return {}
    if has_varlen_kernel(batch.tokens_BT.device, dtype, dropout):
        return {"segment_ends": batch.segment_ends}
    return {"segment_lengths": batch.segment_lengths}


def _attention_dropout(hf: nn.Module) -> float:
    config: Any = hf.config
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)
