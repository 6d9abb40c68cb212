"""Which strategies fit, and the one that takes least time, or sends least: closed forms."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import UserError
from atoll.plan.memory import Memory, memory_of, why_unknown
from atoll.plan.processors import Measured
from atoll.plan.seconds import StepSeconds, rates_of, step_seconds
from atoll.plan.shapes import FAMILIES, Shape, check_architecture
from atoll.plan.traffic import Sent, bytes_sent, is_known, total
from atoll.settings import Run, checked, dumped

# of a device's memory; the allocator, libraries and fragmentation take the rest
USABLE = 0.92
# Each is tried without activation checkpointing, then with it; of two that send the same, the
# first is taken.
ORDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {}),
    ("shard_grad_op", {}),
    ("hybrid_shard_zero2", {}),
    ("hybrid_shard", {}),
    ("full_shard", {}),
    ("full_shard", {"sync_every_microbatch": True}),
    ("full_shard", {"tensor": "node"}),
    ("full_shard", {"tensor": "node", "pipeline": 2}),
    ("full_shard", {"expert": "node"}),
    ("hybrid_shard", {"expert": "node"}),
    ("full_shard_offload", {"sync_every_microbatch": True}),
)
ACTIVATION_CHECKPOINTING = ("none", "full")


@dataclass(frozen=True)
class Option:
    """A strategy, what it needs and sends, and whether it fits."""

    overrides: tuple[str, ...]
    activation_checkpointing: str
    memory: Memory
    sent: Sent
    seconds: StepSeconds
    fits: bool | None  # None: the device's memory is not known, or what a layout keeps in it


def options(
    run: Run,
    shape: Shape,
    tree: Mapping[str, Mapping[str, Any]],
    measured: Measured | None = None,
) -> Iterator[Option]:
    """Every strategy that this model and these ranks allow, in order of preference.

    tree: sharding's name -> the content of its YAML. A strategy of the user's own comes last.
    measured: the certificate's rates, which win over those that the facility states.
    """
    order = ORDER if run.world_size > 1 else (("single", {}),)
    if run.world_size > 1 and not is_known(run.sharding):
        own = run.sharding.name
        order, tree = (*order, (own, {})), {**tree, own: dumped(run)["sharding"]}
    for checkpointing in ACTIVATION_CHECKPOINTING:
        for name, changes in order:
            sized = {axis: run.ranks_per_node if v == "node" else v for axis, v in changes.items()}
            if any(size is not True and size == 1 for size in sized.values()):
                continue
            if "expert" in sized and shape.family not in FAMILIES:
                continue  # how it keeps its experts is known when it is loaded
            try:
                candidate = _with(run, dict(tree[name]) | sized, checkpointing)
                check_architecture(shape, candidate.sharding)
            except UserError:  # the ranks or the model cannot be divided so
                continue
            memory = memory_of(candidate, shape)
            overrides = [f"sharding={name}"]
            overrides += [f"sharding.{key}={value}".lower() for key, value in sized.items()]
            overrides += _changed_words(run, candidate)
            sent = bytes_sent(candidate, shape)
            enough = None if why_unknown(candidate, shape) else fits(candidate, memory)
            seconds = step_seconds(candidate, shape, rates_of(candidate, measured))
            yield Option(tuple(overrides), checkpointing, memory, sent, seconds, enough)


def fits(run: Run, memory: Memory) -> bool | None:
    """Whether device and host memory are enough; None where the facility does not state them."""
    node = run.facility.node
    if run.sharding.layouts and not is_known(run.sharding):
        return None
    device = node.device_memory_gib
    if node.device == "cpu":
        device = None if node.memory_gib is None else node.memory_gib / run.ranks_per_node
    if device is None:
        return None
    host = node.memory_gib
    if host is not None and host_gib(run, memory) > USABLE * host:
        return False
    if memory.host and host is None:
        return None
    return memory.whole_gib <= USABLE * device


def host_gib(run: Run, memory: Memory) -> float:
    """What ranks with devices have in their node's memory: what they offload, and what is saved."""
    if run.facility.node.device == "cpu":
        return 0.0
    return (memory.host + memory.checkpoint) * run.ranks_per_node / 2**30


def choose(candidates: list[Option]) -> Option:
    """Of those that fit, what takes least time, then computes least, then needs least memory.

    Where the time of one whose bytes are known is not, what sends least, with offload and
    activation checkpointing only if need be.

    Raises `UserError` if none does, with what is nearest to fitting.
    """
    if not candidates:
        raise nothing_suits()
    known = [option for option in candidates if option.fits is not None]
    if not known:
        full_shard = [o for o in candidates if o.overrides == ("sharding=full_shard",)]
        return (full_shard or candidates)[0]
    fitting = [option for option in known if option.fits]
    if not fitting:
        least = min(candidates, key=lambda option: option.memory.whole)
        raise nothing_fits(least.memory.whole, least.overrides)
    sized = [option for option in fitting if total(option.sent) is not None]
    if sized and all(option.seconds.total is not None for option in sized):
        return min(sized, key=_time)
    return min(fitting, key=_cost)


def nothing_suits() -> UserError:
    """For ranks that divide in no way that the model allows."""
    return UserError(
        "no strategy suits this model on these ranks",
        "change nodes or ranks_per_node: see `atoll plan`",
    )


def nothing_fits(least_bytes: int, words: Sequence[str]) -> UserError:
    """For devices that are too small; with what is nearest to fitting."""
    return UserError(
        f"no strategy fits: the least is {least_bytes / 2**30:.1f} GiB a device "
        f"({' '.join(words)})",
        "more nodes, fewer training.microbatch_samples, or a shorter data.sequence_tokens",
    )


def _time(option: Option) -> tuple[bool, float, float, float]:
    """Offload's way to the host has no time here, so it stays the last resort.

    Of two bound by the same link, the one that recomputes nothing: a peak is seldom met.
    """
    time, compute = option.seconds.total or 0.0, option.seconds.compute or 0.0
    return option.memory.host > 0, time, compute, option.memory.peak


def _cost(option: Option) -> tuple[bool, int, float]:
    """Offload is the last resort, activation checkpointing the one before."""
    checkpointing = ACTIVATION_CHECKPOINTING.index(option.activation_checkpointing)
    sent = total(option.sent)
    return option.memory.host > 0, checkpointing, math.inf if sent is None else sent


def _with(run: Run, sharding: dict[str, Any], activation_checkpointing: str) -> Run:
    """The same run so spread; `UserError` where sizes do not multiply."""
    values = dumped(run)
    values["sharding"] = sharding
    values["training"]["activation_checkpointing"] = activation_checkpointing
    if run.training.device_batch_samples is None:
        return checked(values)
    # the same samples in a step, whatever ranks have samples of their own
    values["training"]["device_batch_samples"] = None
    candidate = checked(values)
    share = run.training.global_batch_samples // candidate.axes.data
    training = candidate.training.model_copy(update={"device_batch_samples": share})
    return candidate.model_copy(update={"training": training})


def _changed_words(run: Run, candidate: Run) -> list[str]:
    names = ("device_batch_samples", "activation_checkpointing")
    values = {name: getattr(candidate.training, name) for name in names}
    return [
        f"training.{name}={value}"
        for name, value in values.items()
        if value != getattr(run.training, name)
    ]
