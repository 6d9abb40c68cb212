"""Pipeline parallelism: which layers are whose, in which order microbatches pass, and the step.

Legend: P ranks of a pipeline, v stages of each, S = P*v stages; stage s lives on rank s % P.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.data.batch import Batch
from atoll.models.parts import blocks_of
from atoll.sharding.mesh import Meshes
from atoll.sharding.step_plan import StepPlan, set_gradient_sync

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """One microbatch through one of this rank's stages, in one direction."""

    direction: str
    microbatch: int
    stage: int


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
    rank, size = axes.stage(meshes.rank), model.hf.config.hidden_size
    stages = Stages(rank, axes.pipeline, stages_per_rank, meshes.pipeline, size)
    blocks = len(blocks_of(model.hf, model.parts))
    owners = _owners(model, blocks, stages.count)
    for name, owner in owners.items():
        if owner not in stages.own:
            _put(model.hf, name, _placeholder(model, name))
    for stage in stages.own:
        others = [n for n, owner in owners.items() if owner in stages.own and owner != stage]
        stages.placeholders[stage] = {name: _placeholder(model, name) for name in others}
    model.stages = stages


def schedule_1f1b(stages: Stages, microbatches: int) -> list[Action]:
    """1F1B, and interleaved where a rank has several stages (Narayanan et al. 2021)."""
    total = microbatches * stages.per_rank
    forward = [_action(FORWARD, i, stages) for i in range(total)]
    backward = [_action(BACKWARD, i, stages) for i in range(total)]
    behind = stages.ranks - stages.rank - 1
    if stages.per_rank > 1:
        behind = 2 * behind + (stages.per_rank - 1) * stages.ranks
    ahead = min(behind, total)
    actions = forward[:ahead]
    for position in range(total - ahead):
        actions += [forward[ahead + position], backward[position]]
    return actions + backward[total - ahead :]


def pipeline(model: Any, batches: Sequence[Batch], scale: float, plan: StepPlan) -> Tensor:
    """Gradient accumulation over the microbatches; returns this rank's summed loss, unscaled."""
    stages: Stages = model.stages
    p2p = P2P(stages, plan.compute_dtype)
    actions = schedule_1f1b(stages, len(batches))
    total = torch.zeros((), device=batches[0].tokens_BT.device)
    activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    for position, action in enumerate(actions):
        key = (action.microbatch, action.stage)
        if action.direction == FORWARD:
            received = p2p.receive(action, _hidden_shape(model, batches[action.microbatch]))
            out = model(batches[action.microbatch], plan.compute_dtype, received, action.stage)
            activations[key] = (received, out)
            if stages.is_last(action.stage):
                total += out.detach()
            else:
                p2p.send(action, out.detach())
            continue
        received, out = activations.pop(key)
        later = (other for other in actions[position + 1 :] if other.direction == BACKWARD)
        set_gradient_sync(model, plan, last=all(other.stage != action.stage for other in later))
        if stages.is_last(action.stage):
            (out * scale).backward()
        else:
            out.backward(p2p.receive(action, tuple(out.shape)))
        if received is not None:
            assert received.grad is not None
            p2p.send(action, received.grad)
    p2p.delivered()
    return total


def forward_only(model: Any, batch: Batch, plan: StepPlan) -> Tensor:
    """One microbatch through all stages: the summed loss on the last rank, zero elsewhere."""
    stages: Stages = model.stages
    p2p = P2P(stages, plan.compute_dtype)
    loss = torch.zeros((), device=batch.tokens_BT.device)
    for stage in stages.own:
        action = Action(FORWARD, 0, stage)
        received = p2p.receive(action, _hidden_shape(model, batch))
        out = model(batch, plan.compute_dtype, received, stage)
        if stages.is_last(stage):
            loss = out
        else:
            p2p.send(action, out)
    p2p.delivered()
    return loss


class P2P:
    """Hidden states to the next stage, their gradients to the one before."""

    def __init__(self, stages: Stages, dtype: torch.dtype) -> None:
        self.stages, self.dtype = stages, dtype
        self.sent: list[tuple[Any, Tensor]] = []  # a message must live until it has arrived

    def send(self, action: Action, message: Tensor) -> None:
        to = action.stage + (1 if action.direction == FORWARD else -1)
        message = message.contiguous()
        peer = to % self.stages.ranks
        work = dist.isend(
            message, group=self.stages.group, group_dst=peer, tag=self._tag(action.microbatch, to)
        )
        self.sent.append((work, message))

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor | None:
        """What the neighbour sends for an action; the first stage receives tokens from nobody."""
        source = action.stage + (-1 if action.direction == FORWARD else 1)
        if source < 0:
            return None
        device = "cuda" if dist.get_backend(self.stages.group) == "nccl" else None
        message = torch.empty(shape, dtype=self.dtype, device=device)
        peer = source % self.stages.ranks
        tag = self._tag(action.microbatch, action.stage)
        dist.recv(message, group=self.stages.group, group_src=peer, tag=tag)
        return message.requires_grad_(action.direction == FORWARD and torch.is_grad_enabled())

    def delivered(self) -> None:
        """Wait for all that was sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def _tag(self, microbatch: int, stage: int) -> int:
        return microbatch * self.stages.count + stage


def _action(direction: str, position: int, stages: Stages) -> Action:
    """The action at a position of a rank's forward or backward order: P microbatches a stage."""
    group, inside = divmod(position, stages.ranks * stages.per_rank)
    chunk, offset = divmod(inside, stages.ranks)
    if stages.per_rank == 1:
        return Action(direction, position, stages.rank)
    if direction == BACKWARD:
        chunk = stages.per_rank - 1 - chunk
    return Action(direction, group * stages.ranks + offset, chunk * stages.ranks + stages.rank)


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
