"""One campaign of the atlas in one process: the product's model, loss, optimizers and rounds.

Facilities are simulated: one after the other they train, each with an optimizer of its own that
goes on from round to round. Codecs, error feedback, mean and the server's step are those of
atoll.federation, in memory in place of files. Bytes are those of the encoded tensors, both ways;
the first model, and headers of files, are left out.
Legend: B samples, T tokens of a sample, K facilities.
"""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from atlas_texts import ANSWER_TOKENS, TOKENS, Texts, divided, samples
from torch import Tensor

from atoll.config.compose import compose
from atoll.data.batch import Batch
from atoll.federation.combine import COMBINE
from atoll.federation.error_feedback import write_encoded
from atoll.federation.fragments import fragments_of
from atoll.federation.next_model import RESIDUAL
from atoll.federation.step import STEPS, fresh_memory
from atoll.federation.tensors import Stretch
from atoll.models.build import build_config, build_model, weights_for
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Run
from atoll.settings.federation import Rule
from atoll.train.optimizer import NamedOptimizer, learning_rate, make_optimizer, take_step

BATCH = 8  # samples of a facility's step
CLIP_NORM = 1.0
SYNCHRONOUS = "synchronous"
# codec of updates -> of the way down, where the model as a whole cannot be thinned out
DOWN = {"int2": "int4", "sparse": "int4", "topk": "int4"}
SIZES = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS,
    "tie_word_embeddings": "false",
}  # fmt: skip
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """One campaign, or the synchronous run beside it: all that its loss depends on."""

    update: str  # the server's step; `synchronous`: gradients are averaged in every step
    codec: str
    inner_steps: int  # of a facility in a round
    facilities: int
    split: str  # iid, by_language
    seed: int
    steps: int  # of a facility in all
    rate: float  # the optimizer's, at its peak
    outer_rate: float = 1.0
    beta1: float = 0.9  # of the server's step
    fragments: int = 1  # of which a round sends one, the next in turn
    overlap_rounds: int = 0  # so many later a facility takes what was averaged
    merge_alpha: float = 0.0  # of its own weights, in what it takes
    optimizer: str = "adamw"  # of a facility's steps, and of the synchronous run's

    @property
    def rule(self) -> Rule:
        return Rule(update=self.update, learning_rate=self.outer_rate, beta1=self.beta1)


@dataclass
class Facility:
    """A facility's own model and optimizer, its text, and what encoding has left out."""

    model: Any
    optimizer: NamedOptimizer
    text: Tensor
    residual: Weights


class Sent:
    """What an encoding writes: counted and dropped."""

    def __init__(self) -> None:
        self.bytes = 0

    def put(self, stretch: Stretch, values_N: Tensor) -> None:
        self.bytes += values_N.numel() * values_N.element_size()


def run_cell(cell: Cell) -> dict[str, Any]:
    """Losses in nats a byte, the share of questions answered rightly, bytes sent by a facility."""
    texts = divided(cell.facilities, cell.split)
    train = synchronous if cell.update == SYNCHRONOUS else federated
    model, sent_bytes = train(cell, texts)
    return {
        "validation": mean_loss(model, texts.validation_BT),
        "test": mean_loss(model, texts.test_BT),
        "answered": share_answered(model, texts.questions_QAT),
        "bytes": sent_bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def synchronous(cell: Cell, texts: Texts) -> tuple[Any, float]:
    """Every step on the batches of all facilities; gradients in fp32 go up and down."""
    run, count = settings(cell), len(texts.training)
    model = model_of(run)
    optimizer = make_optimizer(run.optimizer, model)
    for step in range(1, cell.steps + 1):
        for place, text in enumerate(texts.training):
            backward(model, batch_of(cell, text, place, step), count)
        take_step(optimizer, learning_rate(run.optimizer, step, cell.steps, 1), CLIP_NORM)
    values = sum(p.numel() for p in model.parameters())
    return model, 2 * 4 * values * cell.steps


def federated(cell: Cell, texts: Texts) -> tuple[Any, float]:
    """Rounds as a campaign's: train, encode, combine, step, encode, add."""
    run = settings(cell)
    facilities = [facility_of(run, text) for text in texts.training]
    model = model_of(run)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    fresh = fresh_memory(cell.rule) | {RESIDUAL: 0.0}
    memory = {
        name: {kind: torch.full((tensor.numel(),), begin) for kind, begin in fresh.items()}
        for name, tensor in weights.items()
    }
    parts = parts_of(weights, cell.fragments)
    up, down = Sent(), Sent()
    for number, begin in enumerate(range(0, cell.steps, cell.inner_steps)):
        steps = range(begin + 1, min(begin + cell.inner_steps, cell.steps) + 1)
        taken, sent = number - 1 - cell.overlap_rounds, parts[number % cell.fragments]
        updates = []
        for place, facility in enumerate(facilities):
            if taken >= 0:
                take(facility.model, parts[taken % cell.fragments], cell.merge_alpha)
            for step in steps:
                backward(facility.model, batch_of(cell, facility.text, place, step), 1)
                rate = learning_rate(run.optimizer, step, cell.steps, 1)
                take_step(facility.optimizer, rate, CLIP_NORM)
            updates.append(encoded_update(facility, sent, cell.codec, up))
        for name, before in sent.items():
            updates_KN = torch.stack([update[name] for update in updates])
            add_update(before, updates_KN, memory[name], cell, down)
    return model, up.bytes / len(facilities) + down.bytes


def encoded_update(facility: Facility, weights: Weights, codec: str, sent: Sent) -> Weights:
    """What the coordinator decodes of a facility's change; what is left out waits there."""
    decoded, own = {}, dict(facility.model.named_parameters())
    for name, before in weights.items():
        change_N = (own[name].detach() - before).flatten()
        stretch = Stretch(name, 0, len(change_N))
        last_N = facility.residual.get(name)
        decoded[name], facility.residual[name] = write_encoded(
            sent,
            codec,
            stretch,
            change_N,
            last_N,
        )
    return decoded


def add_update(
    weights: Tensor, updates_KN: Tensor, memory: Weights, cell: Cell, sent: Sent
) -> None:
    """The server's part of a round for one tensor, as `NextModel.add`; weights in place."""
    shares_K = torch.full((len(updates_KN),), 1 / len(updates_KN), dtype=torch.float64)
    combined_N = COMBINE[cell.rule.combine](updates_KN, shares_K, cell.rule)
    added_N = STEPS[cell.update](combined_N, memory, cell.rule)
    stretch, codec = Stretch("", 0, len(added_N)), DOWN.get(cell.codec, cell.codec)
    decoded_N, memory[RESIDUAL] = write_encoded(
        sent,
        codec,
        stretch,
        added_N,
        memory[RESIDUAL],
    )
    weights += decoded_N.view_as(weights)


def settings(cell: Cell) -> Run:
    """A run's settings: the schedule of the rate spans all rounds, as a campaign's does."""
    return _settings(cell.seed, cell.optimizer, cell.rate, max(1, cell.steps // 20))


@cache
def _settings(seed: int, optimizer: str, rate: float, warmup_steps: int) -> Run:
    words = [f"model.config.{name}={value}" for name, value in SIZES.items()]
    words += [f"data.sequence_tokens={TOKENS}", f"seed={seed}", f"optimizer.learning_rate={rate}"]
    words += [f"optimizer.warmup_steps={warmup_steps}", f"optimizer={optimizer}"]
    return compose(["facility=laptop", "model=llama_tiny", *words]).run


def model_of(run: Run) -> Any:
    """The product's model with the weights that a run of this seed begins with."""
    config = build_config(run.model, SIZES["vocab_size"], TOKENS, {})
    model = build_model(config, run.training)
    materialize(model, torch.device("cpu"))
    with weights_for(run.model, config, run.seed) as read:
        fill(model.hf, read)
    fill_buffers(model.hf)
    return model


def facility_of(run: Run, text: Tensor) -> Facility:
    model = model_of(run)
    return Facility(model, make_optimizer(run.optimizer, model), text, {})


def parts_of(weights: Weights, fragments: int) -> list[Weights]:
    """The tensors of each fragment, as a campaign divides them; memory is that of the whole."""
    layout = {"model": {name: tuple(tensor.shape) for name, tensor in weights.items()}}
    parts = fragments_of(layout, fragments)
    return [{name: weights[name] for name in part["model"]} for part in parts]


@torch.no_grad()
def take(model: Any, weights: Weights, merge_alpha: float) -> None:
    """Put global weights in the place of a facility's own, or between the two."""
    own = dict(model.named_parameters())
    for name, tensor in weights.items():
        own[name].lerp_(tensor, 1 - merge_alpha)


def batch_of(cell: Cell, text: Tensor, place: int, step: int) -> Batch:
    """What facility `place` reads in a step: the same in every cell of a seed."""
    return batch(samples(text, BATCH, drawn(cell.seed, place, step)))


def drawn(seed: int, place: int, step: int) -> torch.Generator:
    draws = random.Random(f"{seed} {place} {step}").getrandbits(60)
    return torch.Generator().manual_seed(draws)


def batch(windows_BT: Tensor) -> Batch:
    count, tokens = windows_BT.shape[0], windows_BT.shape[1] - 1
    positions_BT = torch.arange(tokens).expand(count, tokens)
    ends = torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32)
    inputs_BT, labels_BT = windows_BT[:, :-1].contiguous(), windows_BT[:, 1:].contiguous()
    return Batch(inputs_BT, labels_BT, positions_BT, ends, (tokens,) * count, count * tokens)


def backward(model: Any, samples_BT: Batch, shares: int) -> None:
    """The gradient of the mean loss, of which this batch is one of so many shares."""
    (model(samples_BT, torch.float32) / (samples_BT.useful_tokens * shares)).backward()


@torch.no_grad()
def mean_loss(model: Any, windows_BT: Tensor) -> float:
    model.eval()
    total = sum(float(model(batch(part), torch.float32)) for part in windows_BT.split(64))
    model.train()
    return total / (windows_BT[:, 1:].numel())


@torch.no_grad()
def share_answered(model: Any, questions_QAT: Tensor) -> float:
    """Of questions with one right answer, how often it is the most probable; 1 in 4 by chance."""
    scores = []
    for part in questions_QAT.flatten(0, 1).split(64):
        logp = model.hf(part[:, :-1]).logits.float().log_softmax(-1)
        logp = logp.gather(2, part[:, 1:, None])[:, -ANSWER_TOKENS:, 0]
        scores.append(logp.sum(1))
    best_Q = torch.cat(scores).view(questions_QAT.shape[:2]).argmax(1)
    return float((best_Q == 0).double().mean())
