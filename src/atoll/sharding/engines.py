"""How one step's gradients are computed, whatever the layout."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from atoll.data.batch import Batch
from atoll.sharding import deepspeed
from atoll.sharding.exchange import EXCHANGES
from atoll.sharding.pipeline import forward_only, pipeline


@dataclass(frozen=True)
class StepPlan:
    """What a step needs beside the batches."""

    compute_dtype: torch.dtype
    autocast: bool
    sync_every_microbatch: bool
    keep_gathered: bool  # between microbatches, for layouts that do not reshard after forward
    exchange: str | None = None  # of gradients by hand, over `ranks`
    ranks: int = 1


def plain(model: nn.Module, batches: Sequence[Batch], scale: float, plan: StepPlan) -> Tensor:
    """Forward and backward over the microbatches; returns this rank's summed loss, unscaled.

    Gradients are exchanged once, after the last microbatch, unless the plan says otherwise.
    """
    total: Tensor | None = None
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with _exchange(model, last or plan.sync_every_microbatch, last, plan):
            with forward_context(plan, batch.tokens_BT.device):
                loss = model(batch, plan.compute_dtype)
            (loss * scale).backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    if plan.exchange is not None and plan.ranks > 1:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        EXCHANGES[plan.exchange](gradients, plan.ranks)
    return total


def forward(model: nn.Module, batch: Batch, plan: StepPlan) -> Tensor:
    """The summed loss of one microbatch, without gradients."""
    with forward_context(plan, batch.tokens_BT.device):
        loss: Tensor = model(batch, plan.compute_dtype)
    return loss


Step = Callable[[Any, Sequence[Batch], float, StepPlan], Tensor]
Forward = Callable[[Any, Batch, StepPlan], Tensor]
ENGINES: dict[str, Step] = {"plain": plain, "pipeline": pipeline, "deepspeed": deepspeed.step}
FORWARDS: dict[str, Forward] = {
    "plain": forward,
    "pipeline": forward_only,
    "deepspeed": deepspeed.forward,
}


def forward_context(plan: StepPlan, device: torch.device) -> AbstractContextManager[None]:
    if plan.autocast:
        return torch.autocast(device.type, dtype=plan.compute_dtype)
    return nullcontext()


def _exchange(
    model: nn.Module, exchange: bool, last: bool, plan: StepPlan
) -> AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if exchange else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(exchange)
        model.set_is_last_backward(last)
        if plan.keep_gathered:
            model.set_reshard_after_backward(last)
    return nullcontext()
