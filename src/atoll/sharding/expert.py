"""Expert parallelism: a mixture's experts divided among ranks (Lepikhin et al. 2020, GShard).

Each token's hidden state goes to the ranks that have its experts and comes back computed. What an
expert does is the family's own code, grouped matrix products included.

Legend: N tokens of a rank, K experts of each, D hidden width, R rows that a rank receives.
"""

import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atoll.errors import UserError
from atoll.models.experts import ROUTED
from atoll.models.parts import blocks_of
from atoll.sharding.mesh import Meshes


def experts_of(block: nn.Module) -> dict[str, Any]:
    """Name in the block -> a module whose every parameter has a matrix for each expert.

    One that is told which experts a token goes to: others send each token to all of them.
    """
    return {
        name: module
        for name, module in block.named_modules()
        if (number := getattr(module, "num_experts", None)) is not None
        and (own := list(module.parameters()))
        and all(parameter.ndim == 3 and len(parameter) == number for parameter in own)
        and inspect.signature(type(module).forward).parameters.keys() >= ROUTED
    }


def split_experts(model: Any, meshes: Meshes) -> None:
    """Give each expert rank its part of each block's experts, and have tokens sent to them."""
    if meshes.expert is None or meshes.same_experts is None:
        return
    for block in blocks_of(model.hf, model.parts):
        for experts in experts_of(block).values():
            for name, parameter in list(experts.named_parameters(recurse=False)):
                beside_experts(parameter, meshes.same_experts.size(-1))
                part = distribute_tensor(parameter, meshes.expert, [Shard(0)])
                setattr(experts, name, nn.Parameter(part))
            experts.forward = ExchangedExperts(experts, meshes.expert.get_group())


def check_experts(hf: Any, blocks: list[nn.Module]) -> None:
    """Raise `UserError` for a model none of whose blocks has experts that could be divided."""
    if not any(experts_of(block) for block in blocks):
        raise UserError(
            f"sharding.expert: {hf.config.model_type} has no experts that are kept in one tensor",
            "sharding.expert=1: every way of sharding goes",
        )


def beside_experts(parameter: Tensor, ranks: int) -> Shard:
    """The axis that ranks with the same experts divide: one of each expert's matrix."""
    for axis in (1, 2):
        if parameter.shape[axis] % ranks == 0:
            return Shard(axis)
    raise UserError(
        f"an expert's matrix ({parameter.shape[1]} x {parameter.shape[2]}) cannot be divided among "
        f"the {ranks} ranks that have the same experts",
        "raise sharding.expert, or choose hybrid_shard",
    )


class ExchangedExperts:
    """The forward pass of a block's experts, of which each rank of a group has some."""

    def __init__(self, experts: Any, group: Any) -> None:
        self.experts, self.group, self.ranks = experts, group, group.size()
        # as the family's code sees it: no hooks, and as many experts as there are here
        self.own = copy.copy(experts)
        self.own._parameters = {}
        self.own.num_experts = experts.num_experts // self.ranks

    def __call__(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """[N, D] -> [N, D]"""
        tokens, choices = experts_NK.shape
        order = experts_NK.flatten().argsort(stable=True)
        counts = experts_NK.flatten().bincount(minlength=self.ranks * self.own.num_experts)
        sent = counts.view(self.ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        goes, comes = sent.sum(1).tolist(), received.sum(1).tolist()
        rows_RD = Exchange.apply(x_ND[order // choices], goes, comes, self.group)
        own_R = torch.arange(self.own.num_experts, device=x_ND.device).repeat(self.ranks)
        computed_RD = self._computed(rows_RD, own_R.repeat_interleave(received.flatten()))
        back: Tensor = Exchange.apply(computed_RD, comes, goes, self.group)
        places = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        chosen_NKD = back[places].view(tokens, choices, -1)
        return (chosen_NKD * weights_NK[..., None]).sum(1).to(x_ND.dtype)

    def _computed(self, rows_RD: Tensor, experts_R: Tensor) -> Tensor:
        """What this rank's experts make of rows.

        FSDP takes the mean of gradients over the ranks that have the same experts, and these saw
        the tokens of all the others too: theirs are divided by the number of those.
        """
        parts = {name: _local(p) for name, p in self.experts.named_parameters(recurse=False)}
        rows_RD = ScaledGradient.apply(rows_RD, float(self.ranks))
        if len(rows_RD):
            self.own.__dict__.update(parts, training=self.experts.training)
            weights = rows_RD.new_ones(len(rows_RD), 1)
            made = type(self.own).forward(self.own, rows_RD, experts_R[:, None], weights)
            for name in parts:
                del self.own.__dict__[name]
        else:  # the other ranks wait for its gradients, which are zero
            made = rows_RD + sum(part[0, 0, 0] for part in parts.values())
        scaled: Tensor = ScaledGradient.apply(made, 1.0 / self.ranks)
        return scaled


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group in turn, and theirs here; the gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, goes: list[int], comes: list[int], group: Any) -> Tensor:
        ctx.goes, ctx.comes, ctx.group = goes, comes, group
        return _all_to_all(rows, goes, comes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.comes, ctx.goes, ctx.group), None, None, None


class ScaledGradient(torch.autograd.Function):
    """The same numbers, whose gradients are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _all_to_all(rows: Tensor, goes: list[int], comes: list[int], group: Any) -> Tensor:
    arrived = rows.new_empty(sum(comes), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), comes, goes, group=group)
    return arrived


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
