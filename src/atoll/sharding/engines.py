"""How one step's gradients are computed, whatever the layout: gradient accumulation.

Every engine runs forward and backward over the microbatches of a step and adds up their gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atoll.data.batch import Batch
from atoll.sharding import deepspeed
from atoll.sharding.exchange import EXCHANGES
from atoll.sharding.pipeline import forward_only, pipeline
from atoll.sharding.step_plan import StepPlan, set_gradient_sync


def plain(model: nn.Module, batches: Sequence[Batch], scale: float, plan: StepPlan) -> Tensor:
    """Gradient accumulation over the microbatches; returns this rank's summed loss, unscaled.

    Gradients are exchanged once, after the last microbatch, unless the plan says otherwise.
    """
    total = torch.zeros((), device=batches[0].tokens_BT.device)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        set_gradient_sync(model, plan, last)
        with _ddp_sync(model, last or plan.sync_every_microbatch):
            with forward_context(plan, batch.tokens_BT.device):
                loss = model(batch, plan.compute_dtype)
            (loss * scale).backward()
        total += loss.detach()
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


def _ddp_sync(model: nn.Module, sync: bool) -> AbstractContextManager[None]:
    is_ddp = isinstance(model, DistributedDataParallel)
    return model.no_sync() if is_ddp and not sync else nullcontext()
