"""Tensor parallelism with sequence-parallel norms (Korthikanti et al. 2022).

Which matrices are split how says transformers (`base_model_tp_plan`), or else a plan here.
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

from atoll.errors import UserError
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
# Of each head alone: a rank has all tokens of its heads, [B, T, H, D].
HEAD_NORM = SequenceParallel(sequence_dim=2, use_local_output=True)
# transformers' word -> ours; others (fused matrices, norms over all heads) are not computed here
STYLES: dict[str, ParallelStyle] = {
    "colwise": COLUMNS,
    "rowwise": ROWS,
    "replicated_with_grad_allreduce": HEAD_NORM,
}
PLANS: dict[str, dict[str, ParallelStyle]] = {
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
            parallelize_module(block, meshes.tensor, plan_of(block, model.hf.config))
            if family in COUNTS_HEADS:
                attention: Any = block.get_submodule(COUNTS_HEADS[family])
                attention.num_heads //= meshes.axes.tensor


def plan_of(block: nn.Module, config: Any) -> dict[str, ParallelStyle]:
    """Module of a block -> how it is divided; `UserError` for a family that has no such plan."""
    if config.model_type in PLANS:
        return PLANS[config.model_type]
    asked = {
        name.split(".*.", 1)[1]: style
        for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items()
        if ".*." in name
    }
    modules = dict(block.named_modules())
    plan = {name: STYLES[style] for name, style in asked.items() if style in STYLES}
    plan = {name: style for name, style in plan.items() if name in modules}
    # norms between attention and MLP, and those two, which see all tokens
    own = {name for name, _ in block.named_children()}
    divided = {name.split(".")[0] for name in plan}
    plan |= dict.fromkeys(divided, AllTokens()) | dict.fromkeys(own - divided, NORM)
    whole = [n for n, _ in block.named_parameters() if n.rpartition(".")[0] not in plan]
    if not divided or whole or set(asked.values()) - set(STYLES):
        raise UserError(
            f"sharding.tensor: {config.model_type} has matrices or norms that belong to all heads "
            "together, which has no plan for tensor ranks",
            "sharding.tensor=1: every way of sharding goes",
        )
    return plan
