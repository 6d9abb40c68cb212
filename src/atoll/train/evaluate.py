"""Loss and figures on the held-out part."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.data.batch import Batch
from atoll.data.loader import Samples
from atoll.settings import Run
from atoll.sharding.engines import StepPlan
from atoll.sharding.process_group import World, gathered, summed
from atoll.train.tasks import TASKS, Judged


@dataclass(frozen=True)
class Evaluated:
    """Mean loss per target (nats), how many targets, and (on the first rank) the figures."""

    loss: float
    targets: int
    figures: dict[str, float]

    def record(self) -> dict[str, float]:
        return {"loss": self.loss, "targets": self.targets, **self.figures}


@torch.no_grad()
def evaluate(
    run: Run,
    model: Any,
    forward: Callable[[Batch, StepPlan], Tensor],
    samples: Samples,
    world: World,
    plan: StepPlan,
) -> Evaluated:
    """The mean loss over the samples, each counted once, the same at any world size."""
    task, axes = TASKS[run.task.name], run.axes
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    kept: list[Judged] = []
    model.eval()
    is_last = axes.stage(world.rank) == axes.pipeline - 1  # the one that knows the loss
    count = _count(samples, run.evaluation.max_samples)
    microbatch = run.training.microbatch_samples
    for ids in _shares(count, axes.data_rank(world.rank), axes.data, microbatch):
        counted = ids[ids >= 0]
        # a rank without samples still runs the pass: sharded layers gather on all ranks
        batch = samples.batch(counted if len(counted) else np.zeros(1, np.int64)).to(world.device)
        output = forward(batch, plan)
        if len(counted) and is_last:
            judged = task.judge(model, batch, output)
            targets = judged.targets.to(judged.loss_sum.device)
            total += torch.stack([judged.loss_sum.double(), targets.double()])
            kept += [judged] if judged.outputs_BL is not None else []
    model.train()
    loss_sum, target_count = summed(world, total).tolist()
    mean = loss_sum / target_count
    outputs, classes = _all_outputs(world, kept)
    figures = task.figures(run, mean, outputs, classes) if world.rank == 0 else {}
    return Evaluated(mean, int(target_count), figures)


def _all_outputs(world: World, kept: list[Judged]) -> tuple[Tensor | None, Tensor | None]:
    """Every rank's outputs and classes together, where the task keeps them."""
    own = [(j.outputs_BL.cpu(), j.classes_B.cpu()) for j in kept if j.outputs_BL is not None]
    every = [pair for pairs in gathered(world, own) for pair in pairs]
    if not every:
        return None, None
    outputs, classes = zip(*every, strict=True)
    return torch.cat(outputs), torch.cat(classes)


def _count(samples: Samples, max_samples: int | None) -> int:
    return len(samples) if max_samples is None else min(max_samples, len(samples))


def _shares(count: int, rank: int, ranks: int, microbatch: int) -> list[np.ndarray]:
    """This rank's microbatches; -1 where there is no sample left for it."""
    per_pass = ranks * microbatch
    passes = -(-count // per_pass)
    ids = np.full(passes * per_pass, -1, np.int64)
    ids[:count] = np.arange(count)
    return list(ids.reshape(passes, ranks, microbatch)[:, rank])
