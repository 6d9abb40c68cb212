"""How parameters are spread over ranks: functions (model, meshes, context) -> model, by name.

To add a layout, write a function here, add it to a table below, and name it in
hydra_conf/sharding/. What it sends is unknown until plan/traffic.py has its formula.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import UserError
from atoll.models.parts import blocks_of
from atoll.settings import Sharding
from atoll.sharding.expert import beside_experts, experts_of
from atoll.sharding.mesh import Meshes


@dataclass(frozen=True)
class ShardingContext:
    """What a layout needs to know beside the model and the meshes."""

    sharding: Sharding
    compute_dtype: torch.dtype
    device: torch.device


Layout = Callable[[Any, Meshes, ShardingContext], Any]


def fsdp(model: Any, meshes: Meshes, context: ShardingContext) -> Any:
    """Shard every block and then the rest over their shard axes (FSDP2, ZeRO-2 and 3).

    With a replicate axis, shards are also replicated (HSDP, ZeRO++'s hpZ).
    """
    half = context.compute_dtype != torch.float32
    reshard = context.sharding.reshard_after_forward
    common: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=context.compute_dtype if half else None,
            # summed in fp32 whatever the arithmetic: the mean of many bf16 gradients loses digits
            reduce_dtype=torch.float32,
        )
    }
    if context.sharding.offload:
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
    for block in blocks_of(model.hf, model.parts):
        if meshes.same_experts is not None:
            _shard_experts(block, meshes.same_experts, reshard is not False, common)
        if any(True for _ in block.parameters()):
            fully_shard(
                block,
                mesh=meshes.data,
                reshard_after_forward=reshard,
                shard_placement_fn=_beside_tensor_axis,
                **common,
            )
    # it takes a batch, whose labels and reference keep their digits; blocks cast what they take
    policy = replace(common["mp_policy"], cast_forward_inputs=False)
    # the root is needed again at once in the backward pass: never reshard it in between
    root = fully_shard(
        model,
        mesh=meshes.rest,
        reshard_after_forward=False,
        **(common | {"mp_policy": policy}),
    )
    if meshes.tensor is not None:
        # the tensor ranks' parts of a sample add up, as in the blocks: they are not averaged
        root.set_gradient_divide_factor(float(meshes.axes.averaged))
        root.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products
    return root


def _shard_experts(
    block: Any, same_experts: DeviceMesh, reshard: bool, common: dict[str, Any]
) -> None:
    """A rank's experts, over the ranks that have the same ones."""
    # the weights of a token's experts stay in the router's own arithmetic
    policy = replace(common["mp_policy"], cast_forward_inputs=False)
    ranks = same_experts.size(-1)
    for experts in experts_of(block).values():
        fully_shard(
            experts,
            mesh=same_experts,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda parameter: beside_experts(parameter, ranks),
            **(common | {"mp_policy": policy}),
        )


def ddp(model: Any, meshes: Meshes, context: ShardingContext) -> Any:
    """Replicate the model and average gradients in buckets during the backward pass."""
    indices = [context.device.index] if context.device.type == "cuda" else None
    with warnings.catch_warnings():
        # torch 2.13 announces another name for broadcast_buffers that 2.10 does not know
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=indices,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )


# Applied while the model is on the meta device, or once it has weights.
BEFORE_WEIGHTS: dict[str, Layout] = {"fsdp": fsdp}
AFTER_WEIGHTS: dict[str, Layout] = {"ddp": ddp}


def apply_layouts(
    known: dict[str, Layout], model: Any, meshes: Meshes | None, context: ShardingContext
) -> Any:
    """Apply, in the order of the YAML, those of its layouts that are in `known`.

    Without meshes there is one rank, and nothing to apply.
    """
    for name in context.sharding.layouts:
        if name not in BEFORE_WEIGHTS | AFTER_WEIGHTS:
            raise UserError(
                f"sharding={context.sharding.name} names an unknown layout: {name}",
                f"choose from {', '.join(BEFORE_WEIGHTS | AFTER_WEIGHTS)}",
            )
        if name in known and meshes is not None:
            model = known[name](model, meshes, context)
    return model


def _beside_tensor_axis(parameter: Tensor) -> Shard | None:
    """Matrices that the tensor axis splits along their rows are sharded along their columns."""
    split_rows = isinstance(parameter, DTensor) and parameter.placements[0] == Shard(0)
    return Shard(1) if split_rows and parameter.ndim > 1 else None
