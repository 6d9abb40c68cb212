"""Perplexity on held-out text."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from atoll.data.loader import Samples
from atoll.sharding.engines import StepPlan, forward_context
from atoll.train.world import World, summed


@dataclass(frozen=True)
class Perplexity:
    """Mean loss per target token (nats), its exponential, and how many targets there were."""

    loss: float
    perplexity: float
    targets: int


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: Samples,
    world: World,
    plan: StepPlan,
    microbatch_samples: int,
    max_samples: int | None,
) -> Perplexity:
    """The mean loss over the samples, each counted once, the same at any world size."""
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    model.eval()
    for ids in _shares(_count(samples, max_samples), world, microbatch_samples):
        counted = ids[ids >= 0]
        # a rank without samples still runs the pass: sharded layers gather on all ranks
        batch = samples.batch(counted if len(counted) else np.zeros(1, np.int64)).to(world.device)
        with forward_context(plan, world.device):
            loss = model(batch, plan.compute_dtype)
        if len(counted):
            total += torch.stack(
                [loss.double(), loss.new_tensor(samples.targets(counted).sum()).double()]
            )
    model.train()
    loss_sum, targets = summed(world, total).tolist()
    loss = loss_sum / targets
    return Perplexity(loss, math.exp(min(loss, 700.0)), int(targets))


def _count(samples: Samples, max_samples: int | None) -> int:
    return len(samples) if max_samples is None else min(max_samples, len(samples))


def _shares(count: int, world: World, microbatch: int) -> list[np.ndarray]:
    """This rank's microbatches; -1 where there is no sample left for it."""
    per_pass = world.size * microbatch
    passes = -(-count // per_pass)
    ids = np.full(passes * per_pass, -1, np.int64)
    ids[:count] = np.arange(count)
    return list(ids.reshape(passes, world.size, microbatch)[:, world.rank])
