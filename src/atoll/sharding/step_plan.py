"""What a step needs beside the model and the batches, whatever engine takes it."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class StepPlan:
    """How the gradients of a step are computed and exchanged."""

    compute_dtype: torch.dtype
    autocast: bool
    sync_every_microbatch: bool
    keep_gathered: bool  # between microbatches, for layouts that do not reshard after forward
    exchange: str | None = None  # of gradients by hand, over `ranks`
    ranks: int = 1


def set_gradient_sync(model: nn.Module, plan: StepPlan, last: bool) -> None:
    """Tell an FSDP model whether the next backward pass is the last of the accumulated ones.

    Exchanged at every microbatch, gradients are added up in shards, and their copies (HSDP)
    averaged after the last. Gathered parameters are kept for the next microbatch only where the
    layout says so.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or plan.sync_every_microbatch)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        if plan.keep_gathered:
            model.set_reshard_after_backward(last)


def free_gathered(model: nn.Module) -> None:
    """Leave each rank its own part alone, behind passes without a backward one.

    Until then FSDP keeps some weights whole, in the arithmetic's numbers, in the place of its own:
    whoever saved or exported them would round them, and an average set in their place not be seen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
