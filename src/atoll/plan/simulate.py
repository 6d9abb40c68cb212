"""How a job scales over nodes, in closed form: its step, what bounds it, and what failures take."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import UserError
from atoll.plan.checkpoint_interval import daly_seconds, seconds_between_failures, useful_share
from atoll.plan.processors import Measured
from atoll.plan.search import best_layout
from atoll.plan.seconds import StepSeconds, rates_of, step_seconds
from atoll.plan.shapes import Shape, check_architecture
from atoll.settings import Run, checked, dumped

RESTART_SECONDS = 300.0  # from a failure until steps are taken again: read, join, warm up
KNEE = 0.8  # of the first count's efficiency
NO_BATCH, UNEVEN = "batch too small", "batch does not divide"
Price = Callable[[Run], tuple[StepSeconds, tuple[str, ...]]]  # a step, and the strategy taken


@dataclass(frozen=True)
class Scaled:
    """A job on so many nodes; None: not known."""

    nodes: int
    batch_samples: int
    busy_nodes: int  # that the batch is enough for
    step_seconds: float
    tokens_per_second: float
    efficiency: float  # tokens per second and node, of those at the first count
    bound: str
    cause: str  # what takes more than an even share of the first count's step
    strategy: tuple[str, ...]
    checkpoint_minutes: float | None  # between two saves
    useful: float | None  # of all time, with failures
    effective_tokens_per_second: float | None


def simulated(
    run: Run,
    counts: Sequence[int],
    weak: bool,
    price: Price,
    save_seconds_one_node: float | None,
) -> list[Scaled]:
    """A line for each count; weak: the batch grows with the nodes, from the first count's.

    save_seconds_one_node: what one node alone would need to write a checkpoint.
    Raises `UserError` where a rate is not known.
    """
    rows: list[Scaled] = []
    first_step: StepSeconds | None = None
    for nodes in counts:
        batch = run.training.global_batch_samples
        if weak:
            batch = batch * nodes // counts[0]
        busy, step, strategy = _busiest(run, nodes, batch, price)
        if step.total is None:
            raise UserError(
                f"{run.facility.name} states no rate for: {', '.join(step.unknown)}",
                "state it: facility.node.link_gbps=…, facility.network.gbps=…",
            )
        first_step = first_step or step
        is_short = batch < nodes * run.axes.data / run.nodes
        waiting = "" if busy == nodes else NO_BATCH if is_short else UNEVEN
        share = batch / nodes / (run.training.global_batch_samples / counts[0])
        rate = batch * run.data.sequence_tokens / step.total
        interval, useful = _with_failures(run, nodes, save_seconds_one_node)
        first = rows[0].tokens_per_second / rows[0].nodes if rows else rate / nodes
        rows.append(
            Scaled(
                nodes=nodes,
                batch_samples=batch,
                busy_nodes=busy,
                step_seconds=step.total,
                tokens_per_second=rate,
                efficiency=rate / nodes / first,
                bound=waiting or step.bound,
                cause=waiting or _cause(step, first_step, share),
                strategy=strategy,
                checkpoint_minutes=interval,
                useful=useful,
                effective_tokens_per_second=None if useful is None else rate * useful,
            )
        )
    return rows


def knee(rows: Sequence[Scaled]) -> Scaled | None:
    """The first count below 80 % of the first one's efficiency that no larger one is above."""
    below = itertools.takewhile(lambda row: row.efficiency < KNEE, reversed(rows))
    return min(below, key=lambda row: row.nodes, default=None)


def _cause(step: StepSeconds, first_step: StepSeconds, share: float) -> str:
    """The part that is longest over its share: of ideal links, none is."""
    over = {name: size - share * first_step.parts[name] for name, size in step.parts.items()}
    return max(over, key=lambda name: over[name])


def chosen_price(
    shape: Shape,
    tree: Mapping[str, Mapping[str, Any]],
    measured: Measured | None = None,
    typed: Sequence[str] = (),
) -> Price:
    """Of the layout that takes least time at that count, where what is typed stays as it is."""

    def price(run: Run) -> tuple[StepSeconds, tuple[str, ...]]:
        best = best_layout(run, shape, tree, measured, typed)
        return best.seconds, best.overrides

    return price


def stated_price(shape: Shape, measured: Measured | None = None) -> Price:
    """Of the strategy that the run states."""

    def price(run: Run) -> tuple[StepSeconds, tuple[str, ...]]:
        check_architecture(shape, run.sharding)
        return step_seconds(run, shape, rates_of(run, measured)), (f"sharding={run.sharding.name}",)

    return price


def _busiest(
    run: Run, nodes: int, batch: int, price: Price
) -> tuple[int, StepSeconds, tuple[str, ...]]:
    """The most nodes up to these that the batch is enough for; others wait."""
    first_refusal: UserError | None = None
    for busy in _counts_below(nodes, batch, run.axes.data / run.nodes):
        try:
            return busy, *price(_at(run, busy, batch))
        except UserError as error:
            first_refusal = first_refusal or error
    assert first_refusal is not None
    raise first_refusal


def _counts_below(nodes: int, batch: int, data_ranks_per_node: float) -> Iterator[int]:
    """These nodes, the most whose ranks divide the batch, and halves: layouts want even counts."""

    def divides(count: int) -> bool:
        return batch % max(1, round(count * data_ranks_per_node)) == 0

    halves = [nodes >> times for times in range(nodes.bit_length())]
    even = next(filter(divides, range(nodes - 1, 0, -1)), nodes)
    yield from sorted({*halves, even}, reverse=True)


def _at(run: Run, nodes: int, batch: int) -> Run:
    """The run on so many nodes; microbatches shrink before ranks are left without a sample."""
    values = dumped(run)
    values |= {"nodes": nodes, "spare_nodes": 0}
    training = values["training"]
    training |= {"global_batch_samples": batch, "device_batch_samples": None}
    per_node = run.axes.data / run.nodes
    share = max(1, int(batch / (per_node * nodes)))
    most = run.training.microbatch_samples
    training["microbatch_samples"] = max(
        (size for size in range(1, most + 1) if share % size == 0), default=1
    )
    return checked(values)


def _with_failures(
    run: Run, nodes: int, save_seconds_one_node: float | None
) -> tuple[float | None, float | None]:
    """Minutes between saves by Daly, and the share of time that lasts."""
    if save_seconds_one_node is None:
        return None, None
    between = seconds_between_failures(nodes, run.restart.failures_per_node_day)
    save = save_seconds_one_node / nodes
    interval = daly_seconds(save, between)
    return interval / 60, useful_share(interval, save, between, RESTART_SECONDS)
