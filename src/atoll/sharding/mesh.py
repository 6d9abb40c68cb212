"""The mesh of ranks, and the groups that layouts take from it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.settings import Run
from atoll.settings.axes import Axes
from atoll.sharding.process_group import set_timeouts


@dataclass(frozen=True)
class Meshes:
    """Who works with whom; None where an axis has one rank.

    data: (replicate, shard) of this rank's blocks; a sample's context ranks are part of shard.
    rest: the same for what is not in a block, whose shard axis takes in the tensor ranks too.
    expert: those that have the other experts of a mixture; same_experts: as data, of one's own.
    """

    axes: Axes
    rank: int
    data: DeviceMesh
    rest: DeviceMesh
    tensor: DeviceMesh | None
    context: Any
    pipeline: Any
    expert: DeviceMesh | None = None
    same_experts: DeviceMesh | None = None


def make_meshes(run: Run, device: torch.device, rank: int) -> Meshes | None:
    """All of them, or None for a single rank: there is nobody to spread over."""
    axes, kind = run.axes, device.type
    if axes.world == 1:
        return None
    shard = axes.shard * axes.context
    sizes = {"pipeline": axes.pipeline, "replicate": axes.replicate, "shard": shard}
    blocks = _mesh(kind, sizes | {"tensor": axes.tensor})
    rest = blocks
    if axes.tensor > 1:
        rest = _mesh(kind, sizes | {"shard": shard * axes.tensor})
    context = None
    if axes.context > 1:
        ways = (axes.world // axes.tokens, axes.context, axes.tensor)
        context = init_device_mesh(kind, ways, mesh_dim_names=("others", "context", "tensor"))
    experts = None
    if axes.expert > 1:
        experts = _mesh(kind, sizes | {"shard": shard // axes.expert, "expert": axes.expert})
    set_timeouts(run)
    return Meshes(
        axes=axes,
        rank=rank,
        data=_data(blocks),
        rest=_data(rest),
        tensor=blocks["tensor"] if axes.tensor > 1 else None,
        context=None if context is None else context["context"].get_group(),
        pipeline=_connected(blocks["pipeline"].get_group(), device) if axes.pipeline > 1 else None,
        expert=None if experts is None else experts["expert"],
        same_experts=None if experts is None else _data(experts),
    )


def _connected(group: Any, device: torch.device) -> Any:
    """A group whose ranks know each other already.

    NCCL makes a group's communicator in its first call, which must not be a batch of sends and
    receives that only some of its ranks take part in (torch's manual, `batch_isend_irecv`).
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _mesh(kind: str, sizes: dict[str, int]) -> DeviceMesh:
    """Axes of one rank are left out (each would make a group for every rank), but for shard."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _data(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    return mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
