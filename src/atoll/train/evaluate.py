"""Loss and figures on the held-out part."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from atoll.data.order import Ints, sample_ids
from atoll.data.samples import SourceSamples
from atoll.monitor.observers import Observers
from atoll.sharding.engines import FORWARDS
from atoll.sharding.process_group import World, gathered_by_first, summed
from atoll.sharding.step_plan import free_gathered
from atoll.train.assemble import TrainState
from atoll.train.run_scores import run_scores
from atoll.train.tasks import TASKS, BatchResult

DRAW_KEY = 0


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per target (nats), how many targets, and (on the first rank) the figures."""

    loss: float
    targets: int
    figures: dict[str, float]

    def record(self) -> dict[str, float]:
        return {"loss": self.loss, "targets": self.targets, **self.figures}


@torch.no_grad()
def evaluate(train_state: TrainState, step: int, observers: Observers) -> Evaluation:
    """The mean loss over the held-out samples, each counted once, the same at any world size."""
    with train_state.heartbeat.at("evaluation"):
        return _evaluate(train_state, step, observers)


def _evaluate(train_state: TrainState, step: int, observers: Observers) -> Evaluation:
    started = time.monotonic()
    run, world, sources = train_state.run, train_state.world, train_state.validation.sources
    totals = torch.zeros(len(sources), 2, dtype=torch.float64, device=world.device)
    by_source = _batch_results(train_state)
    for total, results in zip(totals, by_source, strict=True):
        for result in results:
            targets = result.targets.to(result.loss_sum.device)
            total += torch.stack([result.loss_sum.double(), targets.double()])
    totals = summed(world, totals)
    loss_sum, target_count = totals.sum(dim=0).tolist()
    mean = loss_sum / target_count
    outputs, classes = _all_outputs(world, [*chain.from_iterable(by_source)])
    figures = run_scores(train_state, step)
    if world.rank == 0:
        figures |= TASKS[run.task.name].figures(run, mean, outputs, classes)
        figures |= _losses_of_sources(sources, totals)
    evaluation = Evaluation(mean, int(target_count), figures)
    for observer in observers:
        observer.on_evaluation(step, evaluation.record(), time.monotonic() - started)
    return evaluation


def _losses_of_sources(sources: Sequence[SourceSamples], totals: Tensor) -> dict[str, float]:
    """`loss/NAME` of each of several sources, from its summed loss and its targets."""
    if len(sources) == 1:
        return {}
    means = (totals[:, 0] / totals[:, 1]).tolist()
    return {f"loss/{source.name}": mean for source, mean in zip(sources, means, strict=True)}


def _batch_results(train_state: TrainState) -> list[list[BatchResult]]:
    """Of the microbatches that are this rank's, where it knows their loss, source by source."""
    samples, most = train_state.validation, train_state.run.evaluation.max_samples
    each = None if most is None else max(1, most // len(samples.sources))
    train_state.model.eval()
    results = [
        _results_of(train_state, ids[drawn_ids(len(ids), each)]) for ids in samples.ids_of_sources
    ]
    free_gathered(train_state.wrapped)
    train_state.model.train()
    return results


def _results_of(train_state: TrainState, chosen: Ints) -> list[BatchResult]:
    run, world, axes = train_state.run, train_state.world, train_state.run.axes
    forward, result_of = FORWARDS[run.sharding.step_engine], TASKS[run.task.name].result
    knows_loss = axes.stage(world.rank) == axes.pipeline - 1
    samples, microbatch = train_state.validation, run.training.microbatch_samples
    results: list[BatchResult] = []
    for ids in shares(chosen, axes.data_rank(world.rank), axes.data, microbatch):
        train_state.heartbeat.at("evaluation")
        counted = ids[ids >= 0]
        # a rank without samples still runs the pass: sharded layers gather on all ranks
        batch = samples.batch(counted if len(counted) else np.zeros(1, np.int64)).to(world.device)
        output = forward(train_state.wrapped, batch, train_state.plan)
        if len(counted) and knows_loss:
            results.append(result_of(train_state.model, batch, output))
    return results


def _all_outputs(world: World, results: list[BatchResult]) -> tuple[Tensor | None, Tensor | None]:
    """Every rank's outputs and classes together on the first, where the task keeps them."""
    own = [
        (result.outputs_BL.cpu(), result.classes_B.cpu())
        for result in results
        if result.outputs_BL is not None and result.classes_B is not None
    ]
    every = [pair for pairs in gathered_by_first(world, own) for pair in pairs]
    if not every:
        return None, None
    outputs, classes = zip(*every, strict=True)
    return torch.cat(outputs), torch.cat(classes)


def drawn_ids(samples: int, most: int | None) -> Ints:
    """All held-out samples, or so many, drawn: best-fit packing puts the longest documents first.

    Not by the run's seed, so that runs are compared on the same ones.
    """
    if most is None or most >= samples:
        return np.arange(samples)
    return np.sort(sample_ids(DRAW_KEY, samples, 0, most))


def shares(ids: Ints, rank: int, ranks: int, microbatch: int) -> list[Ints]:
    """This rank's microbatches; -1 where there is no sample left for it."""
    passes = -(-len(ids) // (ranks * microbatch))
    places = np.full(passes * ranks * microbatch, -1, np.int64)
    places[: len(ids)] = ids
    return list(places.reshape(passes, ranks, microbatch)[:, rank])
