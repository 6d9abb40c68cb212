"""Tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022), as a plan per family.

Between attention and MLP each rank holds its part of the tokens; inside, all tokens of its part of
the heads or of the intermediate width.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from atoll.models.parts import blocks_of
from atoll.sharding.mesh import Meshes


class AllTokens(ParallelStyle):
    """Gather the hidden states, a module's first argument, of all tokens on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if "hidden_states" in kwargs:
                return args, kwargs | {"hidden_states": whole(kwargs["hidden_states"])}
            return (whole(args[0]), *args[1:]), kwargs

        def whole(x_BTD: Any) -> Any:
            part = DTensor.from_local(x_BTD, device_mesh, [Shard(1)], run_check=False)
            return part.redistribute(placements=[Replicate()])

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def columns() -> ParallelStyle:
    return ColwiseParallel()


def columns_of_all(dim: int) -> ParallelStyle:
    """Columns, of tokens that the ranks gather first."""
    return ColwiseParallel(input_layouts=Shard(dim))


def rows(dim: int = 1) -> ParallelStyle:
    """Rows; each rank keeps the sum for its own tokens, which are axis `dim`."""
    return RowwiseParallel(output_layouts=Shard(dim))


def norm(dim: int = 1) -> ParallelStyle:
    return SequenceParallel(sequence_dim=dim, use_local_output=True)


def _llama() -> dict[str, ParallelStyle]:
    return {
        "input_layernorm": norm(),
        "self_attn": AllTokens(),
        "self_attn.q_proj": columns(),
        "self_attn.k_proj": columns(),
        "self_attn.v_proj": columns(),
        "self_attn.o_proj": rows(),
        "post_attention_layernorm": norm(),
        "mlp": AllTokens(),
        "mlp.gate_proj": columns(),
        "mlp.up_proj": columns(),
        "mlp.down_proj": rows(),
    }


def _opt() -> dict[str, ParallelStyle]:
    # its MLP sees samples and tokens as one axis
    return {
        "self_attn_layer_norm": norm(),
        "self_attn": AllTokens(),
        "self_attn.q_proj": columns(),
        "self_attn.k_proj": columns(),
        "self_attn.v_proj": columns(),
        "self_attn.out_proj": rows(),
        "final_layer_norm": norm(0),
        "fc1": columns_of_all(0),
        "fc2": rows(0),
    }


def _bert() -> dict[str, ParallelStyle]:
    return {
        "attention.self": AllTokens(),
        "attention.self.query": columns(),
        "attention.self.key": columns(),
        "attention.self.value": columns(),
        "attention.output.dense": rows(),
        "attention.output.LayerNorm": norm(),
        "intermediate.dense": columns_of_all(1),
        "output.dense": rows(),
        "output.LayerNorm": norm(),
    }


PLANS: dict[str, Callable[[], dict[str, ParallelStyle]]] = {
    "llama": _llama,
    "opt": _opt,
    "bert": _bert,
}


# Attention modules that count on their number of heads, where others take what they get.
COUNTS_HEADS = {"opt": "self_attn"}


def split_matrices(model: Any, meshes: Meshes) -> Any:
    """Divide the matrices of each block among the tensor ranks; what is not in a block stays."""
    if meshes.tensor is None:
        return model
    family = model.hf.config.model_type
    for block in blocks_of(model.hf, model.parts):
        if any(True for _ in block.parameters()):
            parallelize_module(block, meshes.tensor, PLANS[family]())
            if family in COUNTS_HEADS:
                attention: Any = block.get_submodule(COUNTS_HEADS[family])
                attention.num_heads //= meshes.axes.tensor
    return model
