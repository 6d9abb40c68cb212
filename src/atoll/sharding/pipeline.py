"""Pipeline parallelism: which layers are whose, and the step. Its order is schedule.py's."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.data.batch import Batch
from atoll.errors import UserError
from atoll.models.build import skeleton
from atoll.models.causal_lm import balances_experts
from atoll.models.parts import PARTS, blocks_of, parts_of
from atoll.models.tiny_copy import tiny_copy
from atoll.models.weights import fill_buffers, materialize
from atoll.sharding.mesh import Meshes
from atoll.sharding.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    Exchange,
    Program,
    evaluation_programs,
    training_programs,
)
from atoll.sharding.step_plan import StepPlan, set_gradient_sync
from atoll.sharding.tied_ends import TiedEnds, add_gradients, tied_ends

# exchanges that may be under way: with more, nothing gains; with fewer, interleaved ranks wait
EXCHANGES_IN_FLIGHT = 2


class Placeholder(nn.Module):
    """In the place of what another stage has: hidden states pass, and nothing is added to them."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds = adds

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **_: Any) -> Tensor:
        if inputs_embeds is not None:
            return inputs_embeds
        first: Tensor = args[0]
        return first.new_zeros(1, dtype=torch.float32) if self.adds else first


@dataclass
class Stages:
    """The stages of a pipeline that this rank has."""

    rank: int
    ranks: int
    per_rank: int
    group: Any
    hidden_size: int
    # stage -> what stands in the place of the rank's other stages while it runs, by name
    placeholders: dict[int, dict[str, nn.Module]] = field(default_factory=dict)
    tied: TiedEnds | None = None

    @property
    def count(self) -> int:
        return self.ranks * self.per_rank

    @property
    def own(self) -> list[int]:
        return list(range(self.rank, self.count, self.ranks))

    def is_last(self, stage: int) -> bool:
        return stage == self.count - 1

    @contextmanager
    def stage_view(self, model: Any, stage: int) -> Iterator[None]:
        """While a stage runs, what belongs to this rank's other stages is not there."""
        real = {name: model.hf.get_submodule(name) for name in self.placeholders[stage]}
        for name, placeholder in self.placeholders[stage].items():
            _put(model.hf, name, placeholder)
        try:
            yield
        finally:
            for name, module in real.items():
                _put(model.hf, name, module)


def split_layers(model: Any, meshes: Meshes, stages_per_rank: int) -> None:
    """Leave this rank its stages: near equal numbers of blocks, the entrance, the exit."""
    axes = meshes.axes
    if axes.pipeline == 1:
        return
    check_between(model.hf.config)
    rank, size = axes.stage(meshes.rank), model.hf.config.hidden_size
    stages = Stages(rank, axes.pipeline, stages_per_rank, meshes.pipeline, size)
    blocks = len(blocks_of(model.hf, model.parts))
    owners = _owners(model, blocks, stages.count)
    stages.tied = tied_ends(model.hf, owners, stages.count, rank, axes.pipeline)
    for name, owner in owners.items():
        if owner not in stages.own:
            _put(model.hf, name, _placeholder(model, name))
    for stage in stages.own:
        others = [n for n, owner in owners.items() if owner in stages.own and owner != stage]
        stages.placeholders[stage] = {name: _placeholder(model, name) for name in others}
    model.stages = stages


def check_between(config: Any) -> None:
    """Raise `UserError` for a family that does more to hidden states than its modules do.

    A stage without any of them must give back what it takes: tried with a small copy.
    """
    if balances_experts(config):
        raise UserError(
            "sharding.pipeline: the balance of experts is of all layers together, which no stage "
            "has",
            "set model.config.output_router_logits=false, or sharding.pipeline=1",
        )
    if config.model_type in PARTS:
        return
    hf = skeleton(tiny_copy(config))
    parts = parts_of(hf)
    materialize(hf, torch.device("cpu"))
    fill_buffers(hf)
    blocks = (f"{parts.blocks}.{i}" for i in range(len(blocks_of(hf, parts))))
    for name in (*parts.entrance, *blocks, *parts.exit):
        if _is_there(hf, name):
            _put(hf, name, Placeholder(adds=False))
    if not _passes_through(hf.get_submodule(parts.backbone), hf.config.hidden_size):
        raise UserError(
            f"sharding.pipeline: {config.model_type} changes hidden states outside its layers, "
            "which every stage would do again",
            "sharding.pipeline=1: context, tensor and every way of sharding go",
        )


def _passes_through(backbone: Any, width: int) -> bool:
    """Whether it gives back hidden states as they are; not one that stumbles over what it lacks."""
    hidden_BTD, positions_BT = torch.ones(1, 8, width), torch.arange(8)[None]
    try:
        with torch.no_grad():
            output = backbone(inputs_embeds=hidden_BTD, position_ids=positions_BT, use_cache=False)
    except Exception:  # what a family's own code raises
        return False
    return torch.equal(output.last_hidden_state, hidden_BTD)


def pipeline(model: Any, batches: Sequence[Batch], scale: float, plan: StepPlan) -> Tensor:
    """Gradient accumulation over the microbatches; returns this rank's summed loss, unscaled."""
    stages: Stages = model.stages
    program = training_programs(stages.ranks, stages.per_rank, len(batches))[stages.rank]
    last_backwards = _last_backwards(program)
    total = torch.zeros((), device=batches[0].tokens_BT.device)
    activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def compute(action: Action, received: Tensor | None) -> Tensor | None:
        key = (action.microbatch, action.stage)
        if action.direction == FORWARD:
            if received is not None:
                received.requires_grad_()
            out = model(batches[action.microbatch], plan.compute_dtype, received, action.stage)
            activations[key] = (received, out)
            if stages.is_last(action.stage):
                total.add_(out.detach())
            return out.detach()
        taken, out = activations.pop(key)
        set_gradient_sync(model, plan, last=action in last_backwards)
        if received is None:
            (out * scale).backward()
        else:
            out.backward(received)
        return None if taken is None else taken.grad

    _carry_out(program, compute, P2P(model, batches, plan.compute_dtype))
    add_gradients(model, total.device)
    return total


def forward_only(model: Any, batch: Batch, plan: StepPlan) -> Tensor:
    """One microbatch through all stages: the summed loss on the last rank, zero elsewhere."""
    stages: Stages = model.stages
    loss = torch.zeros((), device=batch.tokens_BT.device)

    def compute(action: Action, received: Tensor | None) -> Tensor:
        out: Tensor = model(batch, plan.compute_dtype, received, action.stage)
        if stages.is_last(action.stage):
            loss.add_(out)
        return out

    program = evaluation_programs(stages.ranks, stages.per_rank)[stages.rank]
    _carry_out(program, compute, P2P(model, [batch], plan.compute_dtype))
    return loss


# (action, what it takes in) -> what it makes
Compute = Callable[[Action, Tensor | None], Tensor | None]


def _carry_out(program: Program, compute: Compute, p2p: "P2P") -> None:
    stages = p2p.stages.count
    for step in program:
        if isinstance(step, Exchange):
            p2p.start(step)
            continue
        made = compute(step, None if step.source(stages) is None else p2p.received(step))
        if (target := step.target(stages)) is not None:
            assert made is not None
            p2p.made[target] = made
    p2p.finish(0)


class P2P:
    """Hidden states to the next stage, their gradients to the one before.

    Both ends know every message's shape and dtype from the microbatch: messages carry neither.
    """

    def __init__(self, model: Any, batches: Sequence[Batch], dtype: torch.dtype) -> None:
        self.stages: Stages = model.stages
        self.shapes = [_hidden_shape(model, batch) for batch in batches]
        self.device, self.dtype = batches[0].tokens_BT.device, dtype
        self.made: dict[Action, Tensor] = {}
        # what is under way, oldest first: a message's memory must live until it has arrived
        self.under_way: deque[tuple[list[Any], dict[Action, Tensor]]] = deque()
        self.arrived: dict[Action, Tensor] = {}

    def start(self, exchange: Exchange) -> None:
        """Send what was made and receive what is next, all in one batch."""
        self.finish(EXCHANGES_IN_FLIGHT - 1)
        operations, messages = [], {}
        for sends, peer, action in exchange.transfers:
            message = messages[action] = self._sent(action) if sends else self._empty(action)
            call = dist.isend if sends else dist.irecv
            operations.append(dist.P2POp(call, message, group=self.stages.group, group_peer=peer))
        self.under_way.append((dist.batch_isend_irecv(operations), messages))

    def received(self, action: Action) -> Tensor:
        """What an action takes in, once it is here."""
        while action not in self.arrived:
            self.finish(len(self.under_way) - 1)
        return self.arrived.pop(action)

    def finish(self, remaining: int) -> None:
        """Wait for the oldest exchanges, until so many remain."""
        while len(self.under_way) > remaining:
            works, messages = self.under_way.popleft()
            for work in works:
                work.wait()
            own = self.stages.own
            self.arrived |= {a: message for a, message in messages.items() if a.stage in own}

    def _sent(self, action: Action) -> Tensor:
        message = self.made.pop(action).contiguous()
        assert (message.shape, message.dtype) == (self.shapes[action.microbatch], self.dtype)
        return message

    def _empty(self, action: Action) -> Tensor:
        return torch.empty(self.shapes[action.microbatch], dtype=self.dtype, device=self.device)


def _last_backwards(program: Program) -> set[Action]:
    """The last backward pass of each stage: it is the one that exchanges gradients."""
    actions = [step for step in program if isinstance(step, Action)]
    return set({a.stage: a for a in actions if a.direction == BACKWARD}.values())


def _owners(model: Any, blocks: int, stages: int) -> dict[str, int]:
    """Module -> the stage that has it."""
    parts = model.parts
    owners = {f"{parts.blocks}.{i}": i * stages // blocks for i in range(blocks)}
    ends = {0: parts.entrance, stages - 1: parts.exit}
    for stage, names in ends.items():
        owners |= {name: stage for name in names if _is_there(model.hf, name)}
    return owners


def _is_there(hf: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return hf.get_submodule(owner)._modules.get(leaf) is not None


def _placeholder(model: Any, name: str) -> Placeholder:
    return Placeholder(adds=name == model.parts.positions)


def _put(hf: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    hf.get_submodule(owner)._modules[leaf] = module


def _hidden_shape(model: Any, batch: Batch) -> tuple[int, int, int]:
    samples, tokens = model.own_labels(batch).shape
    return samples, tokens, model.stages.hidden_size
