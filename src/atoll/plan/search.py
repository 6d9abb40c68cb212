"""The layout of least time among thousands: axes, ways of sharding, recompute, microbatches.

Tensor, context and expert ranks exchange in every layer, so they stay inside a node unless nothing
else fits; offload comes after that. Recompute and microbatches are priced as what they take.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import UserError
from atoll.plan.choose import Option, choose, fits, nothing_fits, nothing_suits, options
from atoll.plan.memory import memory_of, why_unknown
from atoll.plan.processors import Measured
from atoll.plan.seconds import Rates, rates_of, step_seconds
from atoll.plan.shapes import FAMILIES, Shape, check_architecture
from atoll.plan.traffic import bytes_sent, is_known
from atoll.settings import Run, checked, dumped
from atoll.settings.axes import axes_of
from atoll.settings.sharding import Sharding

WAYS = ("ddp", "shard_grad_op", "hybrid_shard_zero2", "hybrid_shard", "full_shard")
RECOMPUTE = ("none", "selective", "full")
PIPELINES = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (16, 1))  # ranks, stages of each
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # samples
SEARCHED = ("tensor", "context", "expert", "pipeline", "stages_per_rank", "sync_every_microbatch")
NODES_OF_FAST_AXES = (1, 2, 4)  # that they may span: one, and more where nothing fits
# Peaks are not known to better: of times so near, the one that computes and sends less is taken.
NEAR = 1.01


@dataclass(frozen=True)
class Layout:
    """A run so laid out, and the words that make it so."""

    run: Run
    words: tuple[str, ...]


def best_layout(
    run: Run,
    shape: Shape,
    tree: Mapping[str, Mapping[str, Any]],
    measured: Measured | None = None,
    typed: Sequence[str] = (),
) -> Option:
    """The layout that takes least time of those that fit; then least memory.

    Where a rate is not known, the named strategy that sends least. tree: sharding's name -> the
    content of its YAML; typed: words of the command line, whose axes, microbatch and recompute
    stay. Raises `UserError` if nothing fits.
    """
    rates = rates_of(run, measured)
    searched = _is_priced(run, rates) and run.world_size > 1 and is_known(run.sharding)
    if not searched or why_unknown(run, shape):
        return choose(list(options(run, shape, tree, measured)))
    for nodes, offload in [*((n, False) for n in NODES_OF_FAST_AXES), (1, True)]:
        if nodes > run.nodes:
            continue
        tried = layouts(run, shape, tree, typed, nodes, offload)
        chosen = _fastest(shape, rates, tried)
        if chosen is not None:
            return chosen
    every = layouts(run, shape, tree, typed, NODES_OF_FAST_AXES[-1])
    sizes = [(memory_of(layout.run, shape).whole, layout.words) for layout in every]
    raise nothing_fits(*min(sizes)) if sizes else nothing_suits()


def layouts(
    run: Run,
    shape: Shape,
    tree: Mapping[str, Mapping[str, Any]],
    typed: Sequence[str] = (),
    nodes_of_fast_axes: int = 1,
    offload: bool = False,
) -> Iterator[Layout]:
    """Every layout that these ranks and this model allow; what is typed stays as it is."""
    stated = run.training.activation_checkpointing
    recomputes = (stated,) if _is_typed(typed, "activation_checkpointing") else RECOMPUTE
    for words, sharding in _shardings(run, shape, tree, nodes_of_fast_axes, offload):
        if not _stays(sharding, typed):
            continue
        for microbatch in _microbatches(run, sharding, typed):
            for recompute in recomputes:
                yield _laid_out(run, words, sharding, microbatch, recompute)


def _laid_out(
    run: Run, words: tuple[str, ...], sharding: Sharding, microbatch: int, recompute: str
) -> Layout:
    """The run with these choices and the same samples in a step."""
    training, changed = run.training, run.model_copy(update={"sharding": sharding})
    values: dict[str, Any] = {"microbatch_samples": microbatch}
    if training.device_batch_samples is not None:
        values["device_batch_samples"] = training.global_batch_samples // changed.axes.data
    values["activation_checkpointing"] = recompute
    added = [
        f"training.{name}={value}"
        for name, value in values.items()
        if value != getattr(training, name)
    ]
    training = training.model_copy(update=values)
    return Layout(changed.model_copy(update={"training": training}), (*words, *added))


def _is_typed(typed: Sequence[str], name: str) -> bool:
    return any(word.startswith(f"training.{name}=") for word in typed)


def _stays(sharding: Sharding, typed: Sequence[str]) -> bool:
    """Whether it has the sizes that were typed, as sharding.tensor=2."""
    pairs = (word.removeprefix("sharding.").split("=", 1) for word in typed if "=" in word)
    typed_sizes = {name: size.lower() for name, size in pairs if name in SEARCHED}
    return all(str(getattr(sharding, n)).lower() == size for n, size in typed_sizes.items())


def _is_priced(run: Run, rates: Rates) -> bool:
    """Whether every part of a step has its rate; on processors the named strategies are tried."""
    known = (rates.device_tflops, rates.memory_gb_s, rates.link_gbps)
    between = rates.network_gbps is not None or run.nodes == 1
    node = run.facility.node
    sized = node.device_memory_gib is not None and node.device != "cpu"
    return None not in known and between and sized


def _fastest(shape: Shape, rates: Rates, tried: Iterator[Layout]) -> Option | None:
    """Of the layouts that fit; None where none does."""
    priced: list[tuple[Option, Layout]] = []
    for layout in tried:
        if priced and _only_recomputes(layout, priced[-1][1]):
            continue
        if option := _priced(layout, shape, rates):
            priced.append((option, layout))
    if not priced:
        return None
    least = min(_seconds(option) for option, _ in priced)
    near = [each for each in priced if _seconds(each[0]) <= NEAR * least]
    near.sort(key=lambda each: _work(each[0]))
    priced.sort(key=lambda each: _seconds(each[0]))
    return next((option for option, layout in near + priced if _is_allowed(layout.run)), None)


def _only_recomputes(layout: Layout, fitting: Layout) -> bool:
    """Whether it is the one before that fits, and recomputes more: it is slower for certain."""
    microbatch = fitting.run.training.microbatch_samples
    same = layout.run.sharding is fitting.run.sharding
    return same and layout.run.training.microbatch_samples == microbatch


def _priced(layout: Layout, shape: Shape, rates: Rates) -> Option | None:
    """None where it does not fit."""
    run = layout.run
    memory = memory_of(run, shape)
    if not fits(run, memory):
        return None
    recompute = run.training.activation_checkpointing
    sent, seconds = bytes_sent(run, shape), step_seconds(run, shape, rates, memory)
    return Option(layout.words, recompute, memory, sent, seconds, True)


def _seconds(option: Option) -> float:
    return option.seconds.total or 0.0


def _work(option: Option) -> tuple[float, int]:
    """What is computed and sent, hidden or not: no overlap is as whole as on paper; then memory."""
    step = option.seconds
    busy = (step.compute or 0.0) + (step.memory or 0.0) + (step.bubble or 0.0)
    sent = sum(size or 0.0 for size in step.sent.values())
    return round(busy + sent, 6), option.memory.peak


def _is_allowed(run: Run) -> bool:
    """Whether the settings take it: some ways do not go with some optimizers and tasks."""
    try:
        checked(dumped(run))
    except UserError:
        return False
    return True


def _shardings(
    run: Run, shape: Shape, tree: Mapping[str, Mapping[str, Any]], nodes: int, offload: bool
) -> Iterator[tuple[tuple[str, ...], Sharding]]:
    """Each with its words: data parallel in every way, then with axes."""
    ways = ("full_shard_offload",) if offload else WAYS
    syncs = (True,) if offload else (False, True)
    for way, (tensor, context, expert), (pipeline, stages), sync in itertools.product(
        ways, _fast_axes(run, shape, nodes), PIPELINES, syncs
    ):
        sizes = {"tensor": tensor, "context": context, "expert": expert}
        sizes |= {"pipeline": pipeline, "stages_per_rank": stages}
        if way == "ddp" and (sync or max(sizes.values()) > 1):
            continue
        if way.startswith("hybrid") and run.nodes == 1:  # which is no other then
            continue
        own = Sharding(**tree[way])
        sharding = own.model_copy(update=sizes | {"sync_every_microbatch": sync})
        if not _divides(run, shape, sharding):
            continue
        words = [f"sharding={way}"]
        words += [f"sharding.{name}={size}" for name, size in sizes.items() if size > 1]
        if sync != own.sync_every_microbatch:
            words.append(f"sharding.sync_every_microbatch={sync}".lower())
        yield tuple(words), sharding


def _fast_axes(run: Run, shape: Shape, nodes: int) -> Iterator[tuple[int, int, int]]:
    """Sizes of tensor, context and expert, which together fill so many nodes at most."""
    yield (1, 1, 1)
    if run.task.name != "causal_lm" or run.model.lora is not None:
        return
    most = run.ranks_per_node * nodes
    sizes = [size for size in range(1, most + 1) if most % size == 0]
    experts = sizes if shape.experts and shape.family in FAMILIES else [1]
    for tensor, context, expert in itertools.product(sizes, sizes, experts):
        if tensor * context <= most and tensor * context * expert > 1 and expert <= most:
            yield tensor, context, expert


def _divides(run: Run, shape: Shape, sharding: Sharding) -> bool:
    """Whether ranks, heads, layers and experts can be divided so."""
    if sharding.pipeline > 1 and (run.task.name != "causal_lm" or run.model.lora is not None):
        return False
    if sharding.expert > 1 and sharding.tensor > 1:
        return False
    try:
        axes_of(run.model_copy(update={"sharding": sharding}))
        check_architecture(shape, sharding)
    except (UserError, ValueError):
        return False
    return True


def _microbatches(run: Run, sharding: Sharding, typed: Sequence[str]) -> list[int]:
    """Those that divide a rank's samples of a step; the typed one alone, where there is one."""
    ranks = run.model_copy(update={"sharding": sharding}).axes.data
    share, rest = divmod(run.training.global_batch_samples, ranks)
    stated = run.training.microbatch_samples
    fixed = _is_typed(typed, "microbatch_samples")
    sizes = (stated,) if fixed else sorted({*MICROBATCHES, stated})
    allowed = [size for size in sizes if not rest and share and share % size == 0]
    if sharding.sync_every_microbatch and not sharding.name.startswith("hybrid"):
        allowed = [size for size in allowed if size < share]  # with one pass it changes nothing
    return allowed
