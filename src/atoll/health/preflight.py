"""Before step 1 every device and link is tried; a node far below the others is refused."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.health.faults import Fault
from atoll.health.judge import job_of, tell
from atoll.health.probes import Figures, measure
from atoll.health.watchdog import node_name
from atoll.settings import Run
from atoll.sharding.process_group import SharedError, World, gathered, say

UNITS = {
    "gemm_tflops": ("matrix products of", "TFLOP/s"),
    "memory_gb_s": ("copies in memory of", "GB/s"),
    "link_in_node_gb_s": ("messages in its node of", "GB/s"),
    "link_between_nodes_gb_s": ("messages to other nodes of", "GB/s"),
}
# Others work on the processors of a node, too; and a first look may meet something that passes.
LEAST_SHARE = {"cpu": 0.3, "cuda": 0.7}
LOOKS = 3
PAUSE_SECONDS = 0.5
MOST_SECONDS = 45.0  # after which there is no further look
HINT = "leave these nodes out (sbatch --exclude), or go on with preflight=false"


@dataclass(frozen=True)
class Tried:
    """A rank's place, and what it measured."""

    node: str
    device: str
    figures: Figures


def preflight(run: Run, run_folder: Path, world: World) -> dict[str, Any] | None:
    """Try all nodes together: the record of it, on every rank; None where it is not asked for.

    Raises `SharedError` where a node is unfit; the first rank has written its fault down.
    """
    if not run.tries_nodes:
        return None
    started = time.monotonic()
    share = run.watch.preflight_share or LEAST_SHARE[world.device.type]
    certified = certified_figures(run)
    tried, unfit = look(world), []
    for again in range(1, LOOKS + 1):
        unfit = unfit_nodes(tried, share, certified)
        over = gathered(world, time.monotonic() - started > MOST_SECONDS)[0]
        if not unfit or again == LOOKS or over:
            break
        time.sleep(PAUSE_SECONDS)
        tried = [best(a, b) for a, b in zip(tried, look(world), strict=True)]
    record = {**spread(tried), "seconds": round(time.monotonic() - started, 3)}
    for line in below_certificate(tried, share, certified):
        say(world, line)
    if not unfit:
        return record
    for fault in unfit if world.rank == 0 else []:
        tell(run_folder, replace(fault, job=job_of(run_folder), time=round(time.time(), 3)))
    names = ", ".join(fault.node for fault in unfit)
    raise SharedError(f"unfit before step 1: {names}: {unfit[0].evidence}", HINT)


def look(world: World) -> list[Tried]:
    """What each rank measures, in order of rank, on every rank."""
    nodes = gathered(world, node_name())
    device = "" if world.device.type == "cpu" else str(world.device)
    return gathered(world, Tried(nodes[world.rank], device, measure(world, nodes)))


def best(first: Tried, second: Tried) -> Tried:
    """The better of two looks: what disturbed one of them may be gone."""
    pairs = zip(asdict(first.figures).items(), asdict(second.figures).values(), strict=True)
    figures = {name: a if b is None else max(a, b) for (name, a), b in pairs}
    return replace(first, figures=Figures(**figures))


def unfit_nodes(
    tried: Sequence[Tried], share: float, certified: dict[str, float] | None = None
) -> list[Fault]:
    """One fault of each node that has a figure below a share of the median of all ranks.

    Ranks share the processors of a node: the best of them counts, and of devices each. A single
    node is compared with the certificate as well: it has no peers.
    """
    worst: dict[str, tuple[float, Fault]] = {}
    alone = len({each.node for each in tried}) == 1
    for name in UNITS:
        values = of_devices(tried, figures_of(tried, name))
        references = {"the median": statistics.median_high(values.values())} if values else {}
        if alone and certified and name in certified:
            references["the certificate"] = certified[name]
        for rank, value in values.items():
            for whose, reference in references.items():
                fault = judged(rank, tried[rank], name, value, reference, whose)
                before = worst.get(fault.node, (share, fault))[0]
                if value / reference < before:
                    worst[fault.node] = value / reference, fault
    return [fault for _, fault in worst.values()]


def judged(rank: int, tried: Tried, name: str, value: float, reference: float, whose: str) -> Fault:
    what, unit = UNITS[name]
    evidence = f"{what} {value:.3g} {unit}, {value / reference:.2f} of {whose}, {reference:.3g}"
    return Fault("unfit", "node", evidence, tried.node, rank, tried.device, phase="start")


def figures_of(tried: Sequence[Tried], name: str) -> dict[int, float]:
    values = {rank: getattr(each.figures, name) for rank, each in enumerate(tried)}
    return {rank: value for rank, value in values.items() if value is not None}


def of_devices(tried: Sequence[Tried], values: dict[int, float]) -> dict[int, float]:
    """The values that count: without a device of its own, a rank's only if its node's best."""
    rising = sorted(values, key=values.__getitem__)
    best_ranks = {tried[rank].node: rank for rank in rising}
    return {
        rank: value
        for rank, value in values.items()
        if tried[rank].device or best_ranks[tried[rank].node] == rank
    }


def spread(tried: Sequence[Tried]) -> dict[str, Any]:
    """Each figure's lowest, with its node, and the median."""
    rows: dict[str, Any] = {}
    for name in UNITS:
        values = figures_of(tried, name)
        if values:
            lowest = min(values, key=values.__getitem__)
            middle = statistics.median_high(values.values())
            rows[name] = {"median": significant(middle), "lowest": significant(values[lowest])}
            rows[name] |= {"node": tried[lowest].node, "rank": lowest}
    return rows


def significant(value: float) -> float:
    return float(f"{value:.4g}")


def certified_figures(run: Run) -> dict[str, float]:
    """What a doctor's job measured of this facility by the same probes; empty where none did."""
    try:
        measured = json.loads(run_dir.certificate(run).read_text())
        figures = {name: measured.get(name) for name in UNITS}
    except (OSError, ValueError, AttributeError):
        return {}
    return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def below_certificate(
    tried: Sequence[Tried], share: float, certified: dict[str, float]
) -> list[str]:
    """What all nodes together are slower at than the certificate says: nobody is named for it."""
    lines = []
    for name, known in certified.items():
        values = figures_of(tried, name)
        middle = statistics.median_high(values.values()) if values else known
        if middle < share * known:
            what, unit = UNITS[name]
            rest = f"the facility's certificate says {known:.3g}"
            lines.append(f"all nodes: {what} {middle:.3g} {unit} in the median, {rest}")
    return lines
