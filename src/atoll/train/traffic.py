"""What ranks send each other in a step: bytes from shapes and mesh, seconds from a sample."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from atoll.models.parts import blocks_of
from atoll.settings.axes import Axes
from atoll.sharding.engines import StepPlan

FP32_BYTES = 4
# how the profiler calls the work of a backend, on the host and on the device
COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "rcclDevKernel")


def bytes_sent(model: Any, axes: Axes, microbatches: int, plan: StepPlan) -> int:
    """Expected bytes one rank sends in a step, over rings (Thakur et al. 2005).

    A gather or a reduce-scatter of n bytes over r ranks sends n (r-1)/r from each, an all-reduce
    twice that.
    """
    replicate, shard = axes.replicate, axes.shard
    whole = _numel(model)
    blocks = sum(_numel(block) for block in blocks_of(model.hf, model.parts))
    exchanges = microbatches if plan.sync_every_microbatch else 1
    averaged = 2 * _ring(replicate) * FP32_BYTES * whole * exchanges
    if not isinstance(model, FSDPModule):
        return round(averaged)
    passes = 1 if plan.keep_gathered else microbatches
    again = 1 if plan.keep_gathered else 2
    gathered = (blocks * again + (whole - blocks)) * passes * plan.compute_dtype.itemsize
    scattered = whole * FP32_BYTES * exchanges
    return round(_ring(shard) * (gathered + scattered) + averaged / shard)


@contextmanager
def timed_collectives(active: bool) -> Iterator[list[float]]:
    """While active, profile; afterwards the list holds the seconds in which a collective ran."""
    seconds: list[float] = []
    if not active:
        yield seconds
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce itself on every rank
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiled:
        yield seconds
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or []
        if event.name.startswith(COLLECTIVES)
    ]
    seconds.append(_covered(spans) / 1e6)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
