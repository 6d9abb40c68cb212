"""The mesh of ranks: a replicate axis times a shard axis."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.errors import UserError
from atoll.settings import Run


def mesh_sizes(run: Run) -> tuple[int, int]:
    """(replicate, shard) sizes; their product is the world size."""
    world = run.world_size
    shard = {"none": 1, "node": run.ranks_per_node, "all": world}.get(
        str(run.sharding.shard), run.sharding.shard
    )
    assert isinstance(shard, int)
    if world % shard:
        raise UserError(
            f"world size ({world}) is not divisible by the shard group ({shard} ranks)",
            "change nodes, ranks_per_node or sharding.shard",
        )
    return world // shard, shard


def make_mesh(run: Run, device: torch.device) -> DeviceMesh | None:
    """The mesh, or None for a single rank: there is nobody to spread over."""
    if run.world_size == 1:
        return None
    return init_device_mesh(device.type, mesh_sizes(run), mesh_dim_names=("replicate", "shard"))
