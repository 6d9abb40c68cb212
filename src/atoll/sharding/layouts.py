"""How parameters are spread: functions (model, mesh, ...) -> model, named in a sharding's YAML.

To add a layout, write a function here, add it to LAYOUTS, and name it in hydra_conf/sharding/.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import UserError
from atoll.models.parts import blocks_of
from atoll.settings import Sharding


@dataclass(frozen=True)
class Spread:
    """What a layout needs to know beside the model and the mesh."""

    sharding: Sharding
    compute_dtype: torch.dtype
    device: torch.device


Layout = Callable[[nn.Module, DeviceMesh, Spread], nn.Module]


def fsdp(model: nn.Module, mesh: DeviceMesh, spread: Spread) -> nn.Module:
    """Shard every block and then the rest over the mesh's shard axis (FSDP2, ZeRO-2 and 3).

    With a replicate axis wider than one, shards are also replicated (HSDP, ZeRO++'s hpZ).
    """
    axes = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    half = spread.compute_dtype != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=spread.compute_dtype if half else None,
        # summed in fp32 whatever the arithmetic: the mean of many bf16 gradients loses digits
        reduce_dtype=torch.float32,
    )
    reshard = spread.sharding.reshard_after_forward
    for block in blocks_of(model.hf, model.parts):
        fully_shard(block, mesh=axes, reshard_after_forward=reshard, mp_policy=policy)
    # the root is needed again at once in the backward pass: never reshard it in between
    return fully_shard(model, mesh=axes, reshard_after_forward=False, mp_policy=policy)


def ddp(model: nn.Module, mesh: DeviceMesh, spread: Spread) -> nn.Module:
    """Replicate the model and average gradients in buckets during the backward pass."""
    indices = [spread.device.index] if spread.device.type == "cuda" else None
    with warnings.catch_warnings():
        # torch 2.13 announces another name for broadcast_buffers that 2.10 does not know
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=indices,
            process_group=mesh["replicate"].get_group(),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )


# Applied while the model is on the meta device, or once it has weights.
BEFORE_WEIGHTS: dict[str, Layout] = {"fsdp": fsdp}
AFTER_WEIGHTS: dict[str, Layout] = {"ddp": ddp}


def apply_layouts(
    known: dict[str, Layout], model: nn.Module, mesh: DeviceMesh | None, spread: Spread
) -> nn.Module:
    """Apply, in the order of the YAML, those of its layouts that are in `known`.

    Without a mesh there is one rank, and nothing to apply.
    """
    for name in spread.sharding.layouts:
        if name not in BEFORE_WEIGHTS | AFTER_WEIGHTS:
            raise UserError(
                f"sharding={spread.sharding.name} names an unknown layout: {name}",
                f"choose from {', '.join(BEFORE_WEIGHTS | AFTER_WEIGHTS)}",
            )
        if name in known and mesh is not None:
            model = known[name](model, mesh, spread)
    return model
