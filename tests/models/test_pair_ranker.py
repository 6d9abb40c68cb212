"""Pairs of answers under families that scale or cap their logits, or balance experts."""

import families
import pytest
import torch
from test_families import NEAR, both

from atoll.data.batch import Batch
from atoll.models.loss import IGNORED
from atoll.models.pair_ranker import PairRanker
from atoll.settings import Task

LENGTHS = (20, 12)  # of the chosen answer with its prompt, and of the rejected one
TASK = Task(name="preference", loss="simpo", beta=0.5, margin=0.0)


def pair() -> Batch:
    torch.manual_seed(1)
    tokens = torch.randint(3, families.VOCABULARY, (1, sum(LENGTHS)))
    labels, ends = tokens.roll(-1, 1), torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
    labels[0, ends[1:] - 1] = IGNORED
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return Batch(tokens, labels, positions, ends.int(), LENGTHS, tokens.numel())


def in_transformers(plain: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
    """The log-probability of each answer, given alone."""
    sums = []
    for tokens in batch.tokens_BT[0].split(LENGTHS):
        logp = plain(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        sums.append(logp.gather(1, tokens[1:, None]).sum())
    return sums


@pytest.mark.parametrize("name", [*families.OF_EACH_KIND, "cohere"])
def test_answers_have_the_log_probabilities_of_transformers(name: str) -> None:
    model, plain = both(name)
    ranker, batch = PairRanker(model.hf, model.parts, 8, TASK).eval(), pair()
    with torch.no_grad():
        ours = ranker(batch, torch.float32)[0]
        torch.testing.assert_close(ours, torch.stack(in_transformers(plain, batch)), **NEAR)


def test_the_balance_of_experts_counts_once_for_each_pair() -> None:
    model, _ = both("mixtral")
    ranker, batch = PairRanker(model.hf, model.parts, 8, TASK), pair()
    balance_of_text = model._balance_loss(model._output(batch, torch.float32, None), batch)
    logp_B2 = ranker.eval()(batch, torch.float32)
    alone = ranker.judged(logp_B2, batch)[0].sum()
    targets = (batch.labels_BT != IGNORED).sum()
    expected = alone + balance_of_text / targets
    torch.testing.assert_close(ranker.train()(batch, torch.float32), expected, **NEAR)
