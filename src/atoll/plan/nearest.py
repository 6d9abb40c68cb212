"""The run nearest to one that does not fit which does: least changed, cheapest changes first."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import UserError
from atoll.plan.choose import fits
from atoll.plan.memory import memory_of
from atoll.plan.shapes import Shape, check_architecture
from atoll.settings import Run, checked, dumped

AXES = ("tensor", "context", "pipeline", "stages_per_rank", "expert")
# Spread further with each; the changes are those that need not be typed.
SHARDINGS = ("hybrid_shard_zero2", "hybrid_shard", "full_shard", "full_shard_offload")
# What a change costs: less of a batch at once costs next to nothing, another way to spread the
# model bytes between nodes, activation checkpointing a third more arithmetic, nodes money.
COSTS = {"microbatch": 1, "sync": 2, "checkpointing": 3, "sharding": 4, "devices": 6}
COSTS |= {"nodes": 8, "offload": 20}
NODE_FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Change:
    """Words that change a run, its values then, and how far it is from the run as typed."""

    words: tuple[str, ...]
    settings: Mapping[str, Any]  # dotted name -> value
    cost: int


@dataclass(frozen=True)
class Near:
    """A run that fits: what to type, and what it needs."""

    words: tuple[str, ...]
    needed_gib: float


def nearest(run: Run, shape: Shape, tree: Mapping[str, Mapping[str, Any]]) -> Near | None:
    """The least changed run that fits; None where none does.

    tree: sharding's name -> the content of its YAML.
    """
    every = itertools.product(_ranks(run), _shardings(run, tree), _checkpointing(run), _passes(run))
    combined = [_joined(changes) for changes in every]
    for change in sorted(combined, key=lambda change: change.cost):
        candidate = _changed(run, change.settings)
        if candidate is None:
            continue
        try:
            check_architecture(shape, candidate.sharding)
        except UserError:
            continue
        memory = memory_of(candidate, shape)
        if fits(candidate, memory):
            return Near(change.words, memory.whole_gib)
    return None


def _ranks(run: Run) -> Iterator[Change]:
    """All devices of a node, and more nodes."""
    devices = run.facility.node.devices
    most = run.facility.limits.max_nodes or run.nodes * NODE_FACTORS[-1]
    if run.facility.scheduler == "none":
        most = 1
    for doublings, factor in enumerate(NODE_FACTORS):
        nodes = run.nodes * factor
        if factor == 1:
            yield Change((), {}, 0)
            if run.ranks_per_node < devices:
                words = (f"ranks_per_node={devices}",)
                yield Change(words, {"ranks_per_node": devices}, COSTS["devices"])
        elif nodes <= most:
            cost = COSTS["nodes"] + doublings
            yield Change((f"nodes={nodes}",), {"nodes": nodes}, cost)


def _shardings(run: Run, tree: Mapping[str, Mapping[str, Any]]) -> Iterator[Change]:
    sync = "sharding.sync_every_microbatch"
    own = {axis: getattr(run.sharding, axis) for axis in AXES}
    yield Change((), {}, 0)
    if "fsdp" in run.sharding.layouts and not run.sharding.sync_every_microbatch:
        yield Change((f"{sync}=true",), {sync: True}, COSTS["sync"])
    for distance, name in enumerate(SHARDINGS):
        content = {**tree[name], **own}
        cost = COSTS["sharding"] + distance
        cost += COSTS["offload"] if content.get("offload") else 0
        yield Change((f"sharding={name}",), {"sharding": content}, cost)
        if not content.get("sync_every_microbatch"):
            content = content | {"sync_every_microbatch": True}
            words = (f"sharding={name}", f"{sync}=true")
            yield Change(words, {"sharding": content}, cost + COSTS["sync"])


def _checkpointing(run: Run) -> Iterator[Change]:
    name = "training.activation_checkpointing"
    yield Change((), {}, 0)
    if run.training.activation_checkpointing != "full":
        yield Change((f"{name}=full",), {name: "full"}, COSTS["checkpointing"])


def _passes(run: Run) -> Iterator[Change]:
    """Smaller microbatches, which more passes make up for."""
    name, samples = "training.microbatch_samples", run.training.microbatch_samples
    yield Change((), {}, 0)
    for halvings in itertools.count(1):
        if samples % 2:
            return
        samples //= 2
        yield Change((f"{name}={samples}",), {name: samples}, COSTS["microbatch"] + halvings)


def _joined(changes: tuple[Change, ...]) -> Change:
    words = tuple(word for change in changes for word in change.words)
    settings = {name: v for change in changes for name, v in change.settings.items()}
    return Change(words, settings, sum(change.cost for change in changes))


def _changed(run: Run, settings: Mapping[str, Any]) -> Run | None:
    """The run so changed; None where its sizes do not multiply."""
    values = dumped(run)
    for name, value in settings.items():
        *path, last = name.split(".")
        group = values
        for part in path:
            group = group[part]
        group[last] = value
    if run.training.device_batch_samples is not None:
        values["training"]["global_batch_samples"] = None  # follows the ranks with samples
    try:
        return checked(values)
    except UserError:
        return None
