"""Tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022), as a plan per family.

Between attention and MLP each rank holds its part of the tokens; inside, all tokens of its part of
the heads or of the intermediate width.
"""

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


COLUMNS = ColwiseParallel()
# A sum that each rank keeps for its own tokens.
ROWS = RowwiseParallel(output_layouts=Shard(1))
NORM = SequenceParallel(use_local_output=True)
PLANS: dict[str, dict[str, ParallelStyle]] = {
    "llama": {
        "input_layernorm": NORM,
        "self_attn": AllTokens(),
        "self_attn.q_proj": COLUMNS,
        "self_attn.k_proj": COLUMNS,
        "self_attn.v_proj": COLUMNS,
        "self_attn.o_proj": ROWS,
        "post_attention_layernorm": NORM,
        "mlp": AllTokens(),
        "mlp.gate_proj": COLUMNS,
        "mlp.up_proj": COLUMNS,
        "mlp.down_proj": ROWS,
    },
    "opt": {
        "self_attn_layer_norm": NORM,
        "self_attn": AllTokens(),
        "self_attn.q_proj": COLUMNS,
        "self_attn.k_proj": COLUMNS,
        "self_attn.v_proj": COLUMNS,
        "self_attn.out_proj": ROWS,
        # its MLP sees samples and tokens as one axis
        "final_layer_norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "fc1": ColwiseParallel(input_layouts=Shard(0)),
        "fc2": RowwiseParallel(output_layouts=Shard(0)),
    },
    "bert": {
        "attention.self": AllTokens(),
        "attention.self.query": COLUMNS,
        "attention.self.key": COLUMNS,
        "attention.self.value": COLUMNS,
        "attention.output.dense": ROWS,
        "attention.output.LayerNorm": NORM,
        # of tokens that the ranks gather first
        "intermediate.dense": ColwiseParallel(input_layouts=Shard(1)),
        "output.dense": ROWS,
        "output.LayerNorm": NORM,
    },
}


# Attention modules that count on their number of heads, where others take what they get.
COUNTS_HEADS = {"opt": "self_attn"}


def split_matrices(model: Any, meshes: Meshes) -> None:
    """Divide the matrices of each block among the tensor ranks; what is not in a block stays."""
    if meshes.tensor is None:
        return
    family = model.hf.config.model_type
    for block in blocks_of(model.hf, model.parts):
        if any(True for _ in block.parameters()):
            parallelize_module(block, meshes.tensor, PLANS[family])
            if family in COUNTS_HEADS:
                attention: Any = block.get_submodule(COUNTS_HEADS[family])
                attention.num_heads //= meshes.axes.tensor
