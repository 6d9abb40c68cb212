"""Silent corruption: a device that computes or keeps something wrongly, and does not say so.

Every so many steps each rank computes a microbatch twice, and its gradients must be the same bits;
what it holds must be the same before and behind the step's computing. Before a checkpoint, copies
of one tensor must be the same on all ranks that have one.
"""

import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from atoll.data.loader import Share
from atoll.health.faults import Fault, add_fault
from atoll.health.judge import job_of
from atoll.models.parts import blocks_of
from atoll.settings import Run
from atoll.sharding.process_group import (
    SharedError,
    World,
    gathered,
    merged_of_all,
    run_on_all_ranks,
    say,
)
from atoll.train.assemble import TrainState
from atoll.train.optimizer import by_mesh
from atoll.train.state_dict import discard_gradients, is_deepspeed, state_dict

Digests = dict[str, Tensor]  # name -> int64, on the device


@dataclass(frozen=True)
class Finding:
    """What one rank says: the first name that went wrong, where it is, and if it ever agrees."""

    node: str
    device: str
    name: str | None  # None: all is as it should be
    repeats: bool = True  # False: no two of its passes give the same bits


def digest(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers of eight bytes, wrapping; of this rank's part.

    Exact in any order; one flipped bit always changes it.
    """
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    flat = own.contiguous().flatten().view(torch.uint8)
    body = flat.numel() // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    total = flat[body:].sum(dtype=torch.int64)
    return total + flat[:body].view(torch.int64).sum() if body else total


class Replay:
    """Holds a run's devices to what they did a moment before."""

    def __init__(self, train_state: TrainState) -> None:
        self.train_state = train_state
        self.every = train_state.run.guard.replay_every_steps
        self.at_rest: Digests = {}

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def before(self, step: int, compute: Callable[[], Tensor]) -> None:
        """Run `compute`, forward and backward of a microbatch, twice, and forget its gradients.

        Every rank calls this. Raises `SharedError` where the two differ.
        """
        self.at_rest = {}
        finding = self._compared(compute)
        if any_rank(self.train_state.world, finding.name is not None):
            # twice more: arithmetic that is free to vary gives other bits each time
            again = self._compared(compute)
            repeats = finding.name is None or again.name is None
            self._judge(step, Finding(finding.node, finding.device, finding.name, repeats))
        self.at_rest = self._state()

    def behind(self, step: int) -> None:
        """Raise `SharedError` where a rank's state is no longer what it was before the step."""
        if not self.at_rest:
            return
        after = self._state()
        name = first_difference(self.at_rest, after)
        self.at_rest = {}
        if any_rank(self.train_state.world, name is not None):
            findings = gathered(self.train_state.world, self._finding(name))
            refuse(self.train_state, step, findings, "{} changed while nothing wrote to it")

    def _state(self) -> Digests:
        """Of what is this rank's own between two updates; DeepSpeed's lies in its own buffers."""
        if is_deepspeed(self.train_state):
            return {}
        return {name: digest(tensor) for name, tensor in state_dict(self.train_state).items()}

    def _compared(self, compute: Callable[[], Tensor]) -> Finding:
        first, second = (self._pass(compute) for _ in range(2))
        return self._finding(first_difference(first, second))

    def _pass(self, compute: Callable[[], Tensor]) -> Digests:
        run, model = self.train_state.run, self.train_state.model
        with gradient_digests(model, run) as digests, same_bits(self.train_state.world.device):
            digests["loss"] = digest(compute())
        discard_gradients(self.train_state)
        return digests

    def _finding(self, name: str | None, repeats: bool = True) -> Finding:
        return Finding(socket.gethostname(), str(self.train_state.world.device), name, repeats)

    def _judge(self, step: int, own: Finding) -> None:
        world = self.train_state.world
        findings = gathered(world, own)
        varying = [finding for finding in findings if not finding.repeats]
        if 2 * len(varying) > world.size:
            say(world, "this arithmetic gives other bits each time: no microbatch is replayed")
            self.every = 0
            return
        refuse(self.train_state, step, findings, "{} was computed twice and differs")


@contextmanager
def gradient_digests(model: Any, run: Run) -> Iterator[Digests]:
    """Name -> the digest of this rank's own gradient, before any exchange, as it is made.

    Whole parameters of a sharded model are only there while a block is called: that is when they
    are looked at. Compiled blocks are not, and then a sharded model's loss alone is compared.
    """
    digests: Digests = {}
    seen: dict[int, Tensor] = {}
    handles: list[Any] = []

    def add(name: str, gradient: Tensor) -> None:
        digests[name] = digests[name] + digest(gradient) if name in digests else digest(gradient)

    def look(prefix: str, module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters(prefix):
            if parameter.requires_grad and id(parameter) not in seen:
                seen[id(parameter)] = parameter
                handles.append(parameter.register_hook(partial(add, name)))

    blocks = [] if run.training.compile else blocks_of(model.hf, model.parts)
    modules = {f"hf.{model.parts.blocks}.{n}": block for n, block in enumerate(blocks)}
    for prefix, module in {"": model, **modules}.items():
        handles.append(module.register_forward_pre_hook(partial(look, prefix)))
    try:
        yield digests
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def same_bits(device: torch.device) -> Iterator[None]:
    """On a GPU, kernels that add in a fixed order, where there are any."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def first_difference(first: Digests, other: Digests) -> str | None:
    """The first name whose digests differ; the host waits for the device once."""
    if first.keys() != other.keys():
        return min(first.keys() ^ other.keys())
    if not first:
        return None
    device = next(iter(first.values())).device
    pairs = [torch.stack([d[name].to(device) for name in first]) for d in (first, other)]
    differs = (pairs[0] != pairs[1]).tolist()
    return next((name for name, flag in zip(first, differs, strict=True) if flag), None)


def microbatches_of(share: Share, run: Run) -> Share:
    """The least of a share that an engine can work on: one microbatch, or one for each stage."""
    least = run.axes.pipeline if run.sharding.stages_per_rank > 1 else 1
    return replace(share, microbatches=share.microbatches[:least])


def check_copies(train_state: TrainState, state: dict[str, Tensor], step: int) -> None:
    """Raise `SharedError` where ranks that have the same tensor, or the same part, differ in it.

    Every rank calls this with its state_dict, before it is saved.
    """
    world = train_state.world
    if world.size == 1:
        return
    copied = copies(train_state, state)
    # of all groups on every rank: one that left early would be waited for in the next
    names = [name for group in copied for name in differing(*group, world.device)]
    if not any_rank(world, bool(names)):
        return
    digests = {
        (name, where(tensor)): int(digest(tensor))
        for _, tensors in copied
        for name, tensor in tensors.items()
    }
    votes: dict[Any, Counter[int]] = {}
    for part in (every := gathered(world, digests)):
        for key, value in part.items():
            votes.setdefault(key, Counter())[value] += 1
    outvoted = next((k for k, v in digests.items() if is_outvoted(votes[k], v)), None)
    tied = next((k for k in digests if len(votes[k]) > 1), None)
    mine = outvoted or (None if any_outvoted(votes, every) else tied)
    finding = Finding(socket.gethostname(), str(world.device), mine and mine[0])
    refuse(train_state, step, gathered(world, finding), "{} is not what its copies are")


def is_outvoted(values: Counter[int], own: int) -> bool:
    """Whether more ranks have another value than have this one."""
    return values[own] < max(values.values())


def any_outvoted(votes: dict[Any, Counter[int]], every: list[dict[Any, int]]) -> bool:
    return any(is_outvoted(votes[key], value) for part in every for key, value in part.items())


def copies(
    train_state: TrainState, state: dict[str, Tensor]
) -> list[tuple[Any, dict[str, Tensor]]]:
    """(group of ranks, tensors of which each of them has the same), for all that are copied."""
    if train_state.run.optimizer.name == "adamw_8bit":  # its state is each rank's own
        state = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
    if is_deepspeed(train_state):
        whole = train_state.model.named_parameters()
        state = state | {f"copy/{n}": p for n, p in whole if getattr(p, "ds_tensor", None) is None}
    names = {id(tensor): name for name, tensor in state.items()}
    divided = any(isinstance(tensor, DTensor) for tensor in state.values())
    found = []
    for same in by_mesh(list(state.values())):
        tensors = {names[id(tensor)]: tensor for tensor in same}
        first = same[0]
        if not isinstance(first, DTensor):
            found += [] if divided else [(None, tensors)]
            continue
        mesh = first.device_mesh
        for axis, placement in enumerate(first.placements):
            if isinstance(placement, Replicate) and mesh.size(axis) > 1:
                found.append((mesh.get_group(axis), tensors))
    return found


def differing(group: Any, tensors: dict[str, Tensor], device: torch.device) -> list[str]:
    """The names of those that are not the same on all ranks of a group.

    device: where the group exchanges; some optimizers count their steps in the host's memory.
    """
    digests = torch.stack([digest(tensor).to(device) for tensor in tensors.values()])
    ends = torch.cat([digests, ~digests])  # the highest, and the complement of the lowest
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    highest, lowest = ends.chunk(2)
    flags = (highest != ~lowest).tolist()
    return [name for name, flag in zip(tensors, flags, strict=True) if flag]


def where(tensor: Tensor) -> tuple[int, ...]:
    """Which part of a tensor this rank has: the same on all that have copies of it."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinate: Any = tensor.device_mesh.get_coordinate()
    pairs = zip(coordinate, tensor.placements, strict=True)
    return tuple(-1 if isinstance(placement, Replicate) else at for at, placement in pairs)


def any_rank(world: World, flag: bool) -> bool:
    """Whether the flag is set on one rank at least."""
    return merged_of_all(world, flag, any)


def refuse(train_state: TrainState, step: int, findings: list[Finding], what: str) -> NoReturn:
    """Write the fault down and raise it on all ranks.

    A node is blamed where all ranks that are wrong, or that may be, are on one.
    """
    world = train_state.world
    wrong = [(rank, finding) for rank, finding in enumerate(findings) if finding.name is not None]
    rank, first = wrong[0]
    nodes = sorted({finding.node for _, finding in wrong})
    ranks = ", ".join(str(number) for number, _ in wrong)
    evidence = what.format(first.name) + ("" if len(wrong) == 1 else f", on ranks {ranks}")
    is_known = len(nodes) == 1
    folder = train_state.run_folder
    fault = Fault(
        "corrupted",
        "node" if is_known else "unknown",
        evidence,
        node=first.node if is_known else "",
        rank=rank if len(wrong) == 1 else None,
        device=first.device if len(wrong) == 1 else "",
        step=step,
        phase="compute",
    )

    def write() -> None:
        add_fault(folder, replace(fault, job=job_of(folder)))

    run_on_all_ranks(world, lambda: write() if world.rank == 0 else None)
    raise SharedError(
        f"step {step}: corrupted on {', '.join(nodes)}, rank {ranks}: {evidence}",
        "nothing was saved of it: submit the same line again without that node, "
        "and have its device tested",
    )
