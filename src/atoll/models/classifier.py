"""A Hugging Face model that gives each sample a label or a score.

Legend: B samples, T tokens of a sample, D hidden width, L labels (one score: L = 1).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.data.batch import Batch
from atoll.models.causal_lm import backbone_output
from atoll.models.parts import Parts

# Where a family's head starts from: what its pooler makes of the first token, or the last token.
POOLED = ("bert",)
HEADS = {"bert": "classifier"}
LAST_TOKEN_HEAD = "score"


class Classifier(nn.Module):
    """Tokens in; the loss summed over samples while it learns, the logits where it is asked.

    separator_id: the token after each text, for families that number the texts of a sample.
    """

    def __init__(self, hf: Any, parts: Parts, separator_id: int | None) -> None:
        super().__init__()
        self.hf = hf
        self.parts = parts
        self.separator_id = separator_id
        self.token_split = None
        self.stages: Any = None

    def forward(self, batch: Batch, compute_dtype: torch.dtype) -> Tensor:
        """The summed loss, fp32, when training; else the logits [B, L], fp32."""
        if self.training and batch.seed is not None:
            torch.manual_seed(batch.seed)
        logits_BL = self._logits(batch, compute_dtype).float()
        assert batch.classes_B is not None, "classification has labels"
        return summed_loss(logits_BL, batch.classes_B) if self.training else logits_BL

    def _logits(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        family = self.hf.config.model_type
        more = {}
        if family in POOLED:
            more = {"token_type_ids": _text_numbers(batch.tokens_BT, self.separator_id)}
        backbone = self.hf.get_submodule(self.parts.backbone)
        output = backbone_output(backbone, self, batch, dtype, more)
        head = self.hf.get_submodule(head_name(family))
        if family in POOLED:
            features_BD = self.hf.dropout(output.pooler_output)
        else:
            last_B = _last_tokens(batch.positions_BT)
            features_BD = output.last_hidden_state[torch.arange(len(last_B)), last_B]
        return torch.as_tensor(head(features_BD))


def head_name(family: str) -> str:
    """The module that no model trained on text alone brings along."""
    return HEADS.get(family, LAST_TOKEN_HEAD)


def classifies(config: Any) -> bool:
    """Whether a configuration is one of `classifier_config`."""
    return getattr(config, "problem_type", None) is not None


def new_head(config: Any) -> str | None:
    """The head that a model's files may lack: a classifier's."""
    return head_name(config.model_type) if classifies(config) else None


def summed_loss(logits_BL: Tensor, classes_B: Tensor) -> Tensor:
    """Cross-entropy of the labels, or with one output the squared error of the scores."""
    if logits_BL.shape[1] == 1:
        return F.mse_loss(logits_BL[:, 0], classes_B, reduction="sum")
    return F.cross_entropy(logits_BL, classes_B.long(), reduction="sum")


def _text_numbers(tokens_BT: Tensor, separator_id: int | None) -> Tensor:
    """0 up to the first separator and with it, 1 after it (Devlin et al. 2019)."""
    ends = torch.eq(tokens_BT, -1 if separator_id is None else separator_id)
    return ((ends.cumsum(1) - ends.long()) > 0).long()


def _last_tokens(positions_BT: Tensor) -> Tensor:
    """The place of each sample's last token: before the padding, whose positions start anew."""
    starts = positions_BT[:, 1:] == 0
    end_B = torch.full_like(positions_BT[:, 0], positions_BT.shape[1] - 1)
    return torch.where(starts.any(1), starts.int().argmax(1), end_B)
