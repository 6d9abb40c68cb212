"""The least seconds that a step takes, in closed form, from a facility's published figures.

Matrix products run at the device's peak, memory and links at their full bandwidth: no run is
faster. A message takes its latency where one is stated. A part whose figure is not stated is
unknown, and so is the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.plan import processors
from atoll.plan.activations import passes_of
from atoll.plan.device_work import flops, moved_bytes, state_bytes
from atoll.plan.memory import Memory, memory_of
from atoll.plan.messages import messages_sent
from atoll.plan.optimizer_work import orthogonal_flops
from atoll.plan.pipeline_parts import Part, busiest, parts_of
from atoll.plan.processors import Measured, waiting_share
from atoll.plan.shapes import Shape
from atoll.plan.traffic import bytes_sent, shards_averaged
from atoll.plan.weights import compute_bytes
from atoll.settings import Run

STATED, MEASURED_HERE = "stated by the facility", "measured by atoll plan --measure"
BY_DOCTOR = "stated by the facility, links measured by atoll doctor --job"


@dataclass(frozen=True)
class Rates:
    """What a device and its links do in a second; None: not stated."""

    device_tflops: float | None  # dense, in the arithmetic of the run
    memory_gb_s: float | None  # GB/s of a device's memory
    link_gbps: float | None  # Gbit/s of a device to others of its node, one direction
    network_gbps: float | None  # Gbit/s of a node to others, one direction
    link_latency_us: float | None = None  # of a message inside a node; None: not counted
    network_latency_us: float | None = None  # of one between nodes; None: not counted
    on_processors: Measured | None = None  # of a node without devices, in place of these
    source: str = STATED


@dataclass(frozen=True)
class StepSeconds:
    """A step by its parts, as one device sees them; None: unknown."""

    compute: float | None
    memory: float | None
    sent: Mapping[str, float | None]  # by what is sent
    hidden: float | None  # of sent, what takes place while the device computes
    bubble: float | None  # what a stage waits for others
    links: Mapping[str, str]  # by what is sent: inside nodes, or between them
    why: str = ""  # it has no time, whatever is stated
    mend: str = ""

    @property
    def total(self) -> float | None:
        sizes = (self.compute, self.memory, self.bubble, *self.sent.values())
        known = [size for size in sizes if size is not None]
        if self.hidden is None or len(known) < len(sizes):
            return None
        return sum(known) - self.hidden

    @property
    def parts(self) -> dict[str, float]:
        """Compute, memory, bubble, and the link: all that is sent, less what is hidden."""
        link = sum(size or 0.0 for size in self.sent.values()) - (self.hidden or 0.0)
        own = {"compute": self.compute, "memory": self.memory, "bubble": self.bubble}
        return {name: size or 0.0 for name, size in own.items()} | {"link": link}

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def unknown(self) -> list[str]:
        parts = {"compute": self.compute, "memory": self.memory, **self.sent}
        return [name for name, size in parts.items() if size is None]


def stated_rates(run: Run) -> Rates:
    """The facility's own figures; its peak is that of bf16, and says nothing of fp32."""
    node, network = run.facility.node, run.facility.network
    tflops = node.peak_tflops if compute_bytes(run) == 2 else None
    return Rates(
        tflops,
        node.device_memory_gb_s,
        node.link_gbps,
        network.gbps,
        node.link_latency_us,
        network.latency_us,
    )


def rates_of(run: Run, measured: Measured | None) -> Rates:
    """The facility's own figures, under what was measured there of the same kind of device."""
    measured, device = measured or {}, run.facility.node.device
    stated = _with_links(run, measured.get("links"), stated_rates(run))
    if "together" not in measured or (measured["device"] == "cpu") != (device == "cpu"):
        return stated
    if device == "cpu":
        own = replace(stated, on_processors=measured, source=MEASURED_HERE)
        return own if run.nodes == 1 else stated
    arithmetic = "bf16" if compute_bytes(run) == 2 else "fp32"
    together, link = measured["together"], measured["collectives"].get("all_gather")
    found = replace(
        stated,
        device_tflops=max(together[f"product_tflops_{arithmetic}"].values()),
        memory_gb_s=together["memory_gb_s"],
        source=MEASURED_HERE,
    )
    if link is None:
        return found
    return replace(found, link_gbps=link["gb_s"] * 8, link_latency_us=link["latency_us"])


def _with_links(run: Run, links: Mapping[str, float] | None, stated: Rates) -> Rates:
    """Under the links between devices that a doctor's job measured.

    Between nodes it measures one pair of ranks: a node has that for each of them at the most, and
    not more than is stated for all its cards together.
    """
    if not links or run.facility.node.device == "cpu":
        return stated
    in_node, pair = (links.get(f"bandwidth_{where}_gb_s") for where in ("in_node", "between_nodes"))
    found = replace(stated, source=BY_DOCTOR)
    if in_node:
        found = replace(found, link_gbps=in_node * 8)
    if pair:
        pairs = pair * 8 * run.ranks_per_node
        found = replace(found, network_gbps=min(pairs, stated.network_gbps or pairs))
    return found


def step_seconds(
    run: Run, shape: Shape, rates: Rates, memory_needed: Memory | None = None
) -> StepSeconds:
    """What an average device spends on a step, by its parts.

    memory_needed: `memory_of` the same run, where it is known already.
    """
    why, mend = _why_no_seconds(run, rates)
    compute, moving, bubble = (None, None, None) if why else _passes(run, shape, rates)
    state, beside = (None, None) if why else _once(run, shape, rates, memory_needed)
    memory = None if state is None or moving is None else state + moving
    groups = _groups(run)
    messages = messages_sent(run, shape)
    sent = {
        kind: _sending(run, rates, kind, size, messages.get(kind, 0.0), *groups[kind])
        for kind, size in _by_group(run, shape).items()
    }
    busy = None if compute is None or memory is None else compute + memory
    hidden = None if busy is None else _hidden(run, sent, busy)
    links = {
        kind: "inside nodes" if _inside(run, *groups[kind]) else "between nodes" for kind in sent
    }
    # behind all microbatches: nothing is sent meanwhile
    compute = None if compute is None or beside is None else compute + beside
    return StepSeconds(compute, memory, sent, hidden, bubble, links, why, mend)


def _passes(
    run: Run, shape: Shape, rates: Rates
) -> tuple[float | None, float | None, float | None]:
    """Of all microbatches on a pipeline's busiest rank, by compute and memory, and its bubble."""
    parts = parts_of(run, shape)
    known = {part: _passes_of(run, shape, rates, part) for part in set(parts)}
    waits = 1.0 if rates.on_processors is None else waiting_share(run, rates.on_processors)
    all_known = [(c or 0.0, m or 0.0) for c, m in (known[part] for part in parts)]
    compute, moving, others = busiest(all_known, waits)
    no_compute, no_moving = (each is None for each in known[parts[0]])
    # once while a first microbatch comes through their stages, and the last goes back
    bubble = waits * others / (run.microbatches * run.sharding.stages_per_rank)
    return (
        None if no_compute else compute,
        None if no_moving else moving,
        None if no_compute or no_moving else bubble,
    )


def _passes_of(
    run: Run, shape: Shape, rates: Rates, part: Part
) -> tuple[float | None, float | None]:
    if (measured := rates.on_processors) is not None:
        return (
            processors.compute_seconds(run, shape, measured, part),
            processors.moving_seconds(run, shape, measured, part),
        )
    return (
        _over(flops(run, shape, part), rates.device_tflops, 1e12),
        _over(moved_bytes(run, shape, part), rates.memory_gb_s, 1e9),
    )


def _once(
    run: Run, shape: Shape, rates: Rates, memory_needed: Memory | None
) -> tuple[float | None, float | None]:
    """What a step has behind all microbatches: memory of its state, and Muon's products."""
    if (measured := rates.on_processors) is not None:
        return (
            processors.state_seconds(run, shape, measured),
            processors.orthogonal_seconds(run, shape, measured),
        )
    state = state_bytes(run, shape, memory_needed or memory_of(run, shape))
    return (
        _over(state, rates.memory_gb_s, 1e9),
        _over(orthogonal_flops(run, shape), rates.device_tflops, 1e12),
    )


def _why_no_seconds(run: Run, rates: Rates) -> tuple[str, str]:
    """Why a step has no time on processors, and what would give it one."""
    if rates.on_processors is None:
        return "", ""
    if run.sharding.engine == "deepspeed":
        why = "what DeepSpeed's engine adds to a step on processors has no formula"
        return why, "measure it in a short run"
    if not processors.has_optimizer_rate(run, rates.on_processors):
        why = f"atoll plan --measure has not measured the step of {run.optimizer.name} here"
        return why, "measure the rates again: atoll plan --measure"
    return "", ""


def _hidden(run: Run, sent: Mapping[str, float | None], busy: float) -> float:
    """What is sent while a device computes; on processors both take the same cores.

    Parameters come all along; gradients and copies go once a step, with the last backward pass.
    """
    by_hand = run.sharding.exchange is not None or not run.sharding.spreads
    if run.facility.node.device == "cpu" or by_hand:
        return 0.0
    along, at_end = ["parameters"], ["copies"]
    (along if run.sharding.sync_every_microbatch else at_end).append("gradients")
    passes, _ = passes_of(run)
    last_backward = busy * (passes - 1) / passes / run.microbatches
    once = min(sum(sent.get(kind) or 0.0 for kind in at_end), last_backward)
    return min(busy, sum(sent.get(kind) or 0.0 for kind in along) + once)


def _sending(
    run: Run,
    rates: Rates,
    kind: str,
    size: float | None,
    messages: float,
    distance: int,
    ranks: int,
) -> float | None:
    """Bytes at their bandwidth, and the latency of messages that follow one another."""
    if rates.on_processors is not None:
        return processors.sending_seconds(run, rates.on_processors, kind, size, messages)
    seconds = None if size is None else _over(size, _gbps(run, rates, distance, ranks), 1e9 / 8)
    if seconds is None:
        return None
    # of a ring's messages those between nodes: it leaves each node once
    together = max(1, min(ranks, run.ranks_per_node // distance))
    between = 0.0 if _inside(run, distance, ranks) else 1 / together
    inside_us = (1 - between) * (rates.link_latency_us or 0.0)
    return seconds + messages * (inside_us + between * (rates.network_latency_us or 0.0)) / 1e6


def _inside(run: Run, distance: int, ranks: int) -> bool:
    return distance * ranks <= run.ranks_per_node


def explained(step: StepSeconds) -> tuple[str, str, str]:
    """Three lines: what bounds a step, its parts, and what is sent by the link it takes."""
    if step.why:
        return "bound by: unknown", step.why, step.mend
    if step.total is None:
        missing = ", ".join(step.unknown) or "the device"
        return (
            "bound by: unknown",
            f"no rate is stated for: {missing}",
            "state facility.node.peak_tflops, device_memory_gb_s, link_gbps and "
            "facility.network.gbps, or the choice goes by bytes",
        )
    sending = sum(size or 0.0 for size in step.sent.values())
    shown = sending - (step.hidden or 0.0)
    parts = {"compute": step.compute, "memory": step.memory, "bubble": step.bubble}
    shares = [f"{name} {(size or 0.0) / step.total:.0%}" for name, size in parts.items()]
    each = [
        f"{kind} {size:,.3g} s ({step.links[kind]})" for kind, size in step.sent.items() if size
    ]
    return (
        f"bound by: {step.bound} of {step.total:,.3g} s",
        f"of a step: {', '.join(shares)}, links {shown / step.total:.0%}",
        f"sending: {', '.join(each) or 'nothing'}; {step.hidden:,.3g} s of it while it computes",
    )


def _over(size: float, rate: float | None, unit: float) -> float | None:
    return None if rate is None else size / (rate * unit)


def _by_group(run: Run, shape: Shape) -> dict[str, float | None]:
    """What is sent, with the averages of copied shards apart: they take another link."""
    sent = dict(bytes_sent(run, shape))
    gradients = sent.get("gradients")
    if "fsdp" in run.sharding.layouts and run.axes.replicate > 1 and gradients is not None:
        copies = shards_averaged(run, shape)
        sent |= {"gradients": gradients - copies, "copies": copies}
    return sent


def _groups(run: Run) -> dict[str, tuple[int, int]]:
    """Who sends to each other, by what is sent: (distance in ranks, how many of them)."""
    axes = run.axes
    shards = axes.shard * axes.context
    own = (axes.tensor, shards) if "fsdp" in run.sharding.layouts else (1, run.world_size)
    return {
        "parameters": own,
        "gradients": own,
        "copies": (axes.tensor * shards, axes.replicate),
        "tensor": (1, axes.tensor),
        "context": (axes.tensor, axes.context),
        "expert": (axes.tensor, axes.expert),
        "pipeline": (run.world_size // axes.pipeline, axes.pipeline),
    }


def _gbps(run: Run, rates: Rates, distance: int, ranks: int) -> float | None:
    """Of one rank's ring: inside a node its link; between nodes its share of the network too.

    A ring leaves each node once however many ranks it has there; rings side by side share.
    """
    per_node = run.ranks_per_node
    if _inside(run, distance, ranks):
        return rates.link_gbps
    together = max(1, per_node // distance)
    if rates.network_gbps is None or (together > 1 and rates.link_gbps is None):
        return None
    share = rates.network_gbps * together / per_node
    return share if together == 1 else min(share, rates.link_gbps or share)
