"""What is learned: a task supplies the model that ends in its loss, and its figures.

A new one is a function for each field, and a line in TASKS.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.data.batch import Batch
from atoll.data.vocabulary import Vocabulary
from atoll.models.build import build_config, build_model, classifier_config
from atoll.models.classifier import summed_loss
from atoll.models.loss import IGNORED
from atoll.settings import Run


@dataclass(frozen=True)
class BatchResult:
    """Of a held-out microbatch: its summed loss, its targets, and where needed its outputs."""

    loss_sum: Tensor
    targets: Tensor
    outputs_BL: Tensor | None = None
    classes_B: Tensor | None = None


@dataclass(frozen=True)
class TaskDefinition:
    """The parts of a run that depend on what is learned."""

    config: Callable[[Run, Vocabulary], Any]
    model: Callable[[Any, Run, Vocabulary], Any]
    result: Callable[
        [Any, Batch, Tensor], BatchResult
    ]  # (model, batch, what its forward pass gave)
    # (run, mean loss, all outputs [N, L], all classes [N]) -> figures to show and record
    figures: Callable[[Run, float, Tensor | None, Tensor | None], dict[str, float]]


def _causal_config(run: Run, vocabulary: Vocabulary) -> Any:
    # no pad id: an embedding's padding row is never learned, and here it is the end's as well
    begin_id = vocabulary.end_id if vocabulary.begin_id is None else vocabulary.begin_id
    special = {"bos_token_id": begin_id, "eos_token_id": vocabulary.end_id}
    added = len(run.tokenizer.add_tokens)
    return build_config(run.model, vocabulary.tokens, run.data.sequence_tokens, special, added)


def _causal_model(config: Any, run: Run, vocabulary: Vocabulary) -> Any:
    return build_model(config, run.training)


def _token_result(model: Any, batch: Batch, loss_sum: Tensor) -> BatchResult:
    return BatchResult(loss_sum, (model.own_labels(batch) != IGNORED).sum())


def _perplexity(
    run: Run, loss: float, outputs: Tensor | None, classes: Tensor | None
) -> dict[str, float]:
    return {"perplexity": math.exp(min(loss, 700.0))}


def _classifier_config(run: Run, vocabulary: Vocabulary) -> Any:
    assert run.data.classes is not None
    tokens = (vocabulary.tokens, run.data.sequence_tokens)
    added = len(run.tokenizer.add_tokens)
    return classifier_config(run.model, run.data.classes, *tokens, vocabulary.pad_id, added)


def _classifier_model(config: Any, run: Run, vocabulary: Vocabulary) -> Any:
    return build_model(config, run.training, separator_id=vocabulary.end_id)


def _row_result(model: Any, batch: Batch, logits_BL: Tensor) -> BatchResult:
    assert batch.classes_B is not None
    loss = summed_loss(logits_BL, batch.classes_B)
    return BatchResult(loss, torch.tensor(len(logits_BL)), logits_BL, batch.classes_B)


def _metrics(
    run: Run, loss: float, outputs: Tensor | None, classes: Tensor | None
) -> dict[str, float]:
    """The metrics that the data set names, by scikit-learn and SciPy."""
    from scipy import stats
    from sklearn import metrics

    assert run.data.classes is not None and outputs is not None and classes is not None
    labels = classes.numpy()
    predictions = outputs[:, 0].numpy() if outputs.shape[1] == 1 else outputs.argmax(1).numpy()
    # of two labels the second's, as GLUE has it
    average = "binary" if len(run.data.classes.labels) == 2 else "macro"
    known: dict[str, Callable[[Any, Any], Any]] = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda a, b: metrics.f1_score(a, b, average=average),
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda a, b: stats.pearsonr(a, b).statistic,
        "spearman": lambda a, b: stats.spearmanr(a, b).statistic,
    }
    return {name: float(known[name](labels, predictions)) for name in run.data.classes.metrics}


def _pair_model(config: Any, run: Run, vocabulary: Vocabulary) -> Any:
    return build_model(config, run.training, task=run.task)


def _pair_result(model: Any, batch: Batch, logp_B2: Tensor) -> BatchResult:
    loss_B, rewards_B2 = model.judged(logp_B2, batch)
    return BatchResult(loss_B.sum(), torch.tensor(len(loss_B)), rewards_B2, loss_B)


def _lead(run: Run, loss: float, rewards: Tensor | None, losses: Tensor | None) -> dict[str, float]:
    """How often the chosen answer leads, and by how much (as TRL's rewards/accuracies, margins)."""
    assert rewards is not None
    leads = rewards[:, 0] - rewards[:, 1]
    return {"accuracy": float((leads > 0).float().mean()), "margin": float(leads.mean())}


TASKS = {
    "causal_lm": TaskDefinition(_causal_config, _causal_model, _token_result, _perplexity),
    "classification": TaskDefinition(_classifier_config, _classifier_model, _row_result, _metrics),
    "preference": TaskDefinition(_causal_config, _pair_model, _pair_result, _lead),
}
