"""Perplexity on held-out text."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.data.batch import Batch
from atoll.data.loader import Samples
from atoll.models.causal_lm import CausalLM
from atoll.models.loss import IGNORED
from atoll.settings.axes import Axes
from atoll.sharding.engines import StepPlan
from atoll.train.world import World, summed


@dataclass(frozen=True)
class Perplexity:
    """Mean loss per target token (nats), its exponential, and how many targets there were."""

    loss: float
    perplexity: float
    targets: int


@torch.no_grad()
def evaluate(
    model: CausalLM,
    forward: Callable[[Batch, StepPlan], Tensor],
    samples: Samples,
    world: World,
    axes: Axes,
    plan: StepPlan,
    microbatch_samples: int,
    max_samples: int | None,
) -> Perplexity:
    """The mean loss over the samples, each counted once, the same at any world size."""
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    model.eval()
    is_last = axes.stage(world.rank) == axes.pipeline - 1  # the one that knows the loss
    count = _count(samples, max_samples)
    for ids in _shares(count, axes.data_rank(world.rank), axes.data, microbatch_samples):
        counted = ids[ids >= 0]
        # a rank without samples still runs the pass: sharded layers gather on all ranks
        batch = samples.batch(counted if len(counted) else np.zeros(1, np.int64)).to(world.device)
        loss = forward(batch, plan)
        if len(counted) and is_last:
            targets = (model.own_labels(batch) != IGNORED).sum()
            total += torch.stack([loss.double(), targets.double()])
    model.train()
    loss_sum, target_count = summed(world, total).tolist()
    mean = loss_sum / target_count
    return Perplexity(mean, math.exp(min(mean, 700.0)), int(target_count))


def _count(samples: Samples, max_samples: int | None) -> int:
    return len(samples) if max_samples is None else min(max_samples, len(samples))


def _shares(count: int, rank: int, ranks: int, microbatch: int) -> list[np.ndarray]:
    """This rank's microbatches; -1 where there is no sample left for it."""
    per_pass = ranks * microbatch
    passes = -(-count // per_pass)
    ids = np.full(passes * per_pass, -1, np.int64)
    ids[:count] = np.arange(count)
    return list(ids.reshape(passes, ranks, microbatch)[:, rank])
