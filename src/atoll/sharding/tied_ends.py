"""An embedding that is the head too, where a pipeline has its two uses on different ranks.

The first stage holds the weight, the last a copy. Both begin as the same numbers and take the same
gradient, the sum of both, so they stay the same bit for bit: one of them is saved and exported.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class TiedEnds:
    """What this rank has of the weight that the first and the last rank of a pipeline share."""

    own: str  # the parameter here, by its name in the Hugging Face model
    original: str  # what it is called where it is not a copy
    peer: int  # the other rank, in the pipeline's group

    @property
    def is_copy(self) -> bool:
        return self.own != self.original


def tied_ends(hf: Any, owners: dict[str, int], stages: int, rank: int, ranks: int) -> Any:
    """What the first and the last rank share of a model that is not divided yet; else None.

    owners: module -> its stage.
    """

    def stage_of(name: str) -> int:
        return next((s for module, s in owners.items() if name.startswith(module + ".")), 0)

    for copy, original in (getattr(hf, "all_tied_weights_keys", None) or {}).items():
        if (stage_of(original), stage_of(copy)) == (0, stages - 1) and rank in (0, ranks - 1):
            return TiedEnds(original if rank == 0 else copy, original, ranks - 1 - rank)
    return None


@torch.no_grad()
def add_gradients(model: Any, device: torch.device) -> None:
    """Give the weight's two holders the sum of their gradients, once those are of a whole step."""
    ends: TiedEnds | None = model.stages.tied
    if ends is None:
        return
    gradient = model.hf.get_parameter(ends.own).grad
    local: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if not local.numel():
        return
    sent = local.to(device).contiguous()
    received = torch.empty_like(sent)
    group = model.stages.group
    operations = [
        dist.P2POp(call, message, group=group, group_peer=ends.peer)
        for call, message in ((dist.isend, sent), (dist.irecv, received))
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    local.add_(received.to(local.device))


def copied_names(model: Any) -> dict[str, str]:
    """Parameter of the model that is a copy -> what it is called in a model that is not divided."""
    ends = None if getattr(model, "stages", None) is None else model.stages.tied
    return {f"hf.{ends.own}": f"hf.{ends.original}"} if ends and ends.is_copy else {}
