"""A causal language model that learns which of two answers is the better one.

Legend: B pairs, T tokens of a pair, D hidden width. Of a 2, the chosen answer is first.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.data.batch import Batch
from atoll.models.causal_lm import CausalLM
from atoll.models.loss import IGNORED, chunked_log_probabilities
from atoll.models.parts import Parts
from atoll.settings import Task


class PairRanker(CausalLM):
    """Pairs in; the loss summed over them while it learns, else their log-probabilities [B, 2]."""

    def __init__(self, hf: nn.Module, parts: Parts, loss_chunk_tokens: int, task: Task) -> None:
        super().__init__(hf, parts, loss_chunk_tokens)
        self.task = task

    def _loss(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        head: Any = self.hf.get_submodule(self.parts.head)
        logp_N = chunked_log_probabilities(
            self.before_head(hidden_BTD).flatten(0, 1),
            head.weight,
            head.bias,
            batch.labels_BT.flatten(),
            self.loss_chunk_tokens,
            self.softcap,
        )
        logp_B2 = _of_answers(logp_N.view_as(batch.labels_BT), batch)
        return self.judged(logp_B2, batch)[0].sum() if self.training else logp_B2

    def _terms(self, batch: Batch) -> int:
        return len(batch.labels_BT)

    def judged(self, logp_B2: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each pair, and the rewards of both answers [B, 2].

        DPO (Rafailov et al. 2023, eq. 7), with the model that the run began with as the reference;
        SimPO (Meng et al. 2024, eq. 6), over the mean of an answer's tokens.
        """
        task = self.task
        if task.loss == "simpo":
            counted = (batch.labels_BT != IGNORED).to(logp_B2.dtype)
            rewards_B2 = task.beta * logp_B2 / _of_answers(counted, batch).clamp_min(1)
        else:
            assert batch.reference_B2 is not None, "DPO has a reference"
            rewards_B2 = task.beta * (logp_B2 - batch.reference_B2)
        margin = task.margin if task.loss == "simpo" else 0.0
        return -F.logsigmoid(rewards_B2[:, 0] - rewards_B2[:, 1] - margin), rewards_B2


def _of_answers(values_BT: Tensor, batch: Batch) -> Tensor:
    """The sums over the tokens of the first and of the second document of each sample."""
    number_BT = (batch.positions_BT == 0).cumsum(1)
    return torch.stack([(values_BT * (number_BT == n)).sum(1) for n in (1, 2)], dim=1)
