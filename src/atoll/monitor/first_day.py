"""The first-day certificate: what a facility's nodes were measured to be and to do, and when.

Nothing in it names a user, an account or a host.
"""

import os
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atoll.health.probes import gemm_dtype, measure
from atoll.launch import Placement
from atoll.monitor.bandwidth import REPEATS, bus_factor
from atoll.settings import Run
from atoll.sharding.own_device import driver_version
from atoll.sharding.process_group import World, gathered

MESSAGE_BYTES = {"cpu": 2**24, "cuda": 2**28}
FILE_BYTES = 2**26


@dataclass(frozen=True)
class Certificate:
    """`facilities/NAME.json`; None: not measured, as of two nodes where there was one."""

    facility: str
    measured_on: str
    nodes: int
    ranks_per_node: int
    devices: int | None
    device: str
    compute_capability: str | None
    device_memory_gib: float | None
    driver: str | None
    torch: str
    gemm_tflops: float
    gemm_dtype: str
    bandwidth_in_node_gb_s: float | None
    bandwidth_between_nodes_gb_s: float | None
    memory_gb_s: float | None
    link_in_node_gb_s: float | None
    link_between_nodes_gb_s: float | None
    file_write_gb_s: float
    transports: list[str]
    image: str
    faults: list[str]


def certificate(
    run: Run,
    run_folder: Path,
    world: World,
    placement: Placement,
    transports: list[str],
    faults: list[str],
) -> dict[str, Any]:
    """Measure together, on all ranks; the same on each of them."""
    each = measure(world, [str(node) for node in gathered(world, placement.node_rank)])
    in_node, between = _groups(world, placement)
    device = torch.cuda.get_device_properties(world.device) if _on_gpu(world) else None
    measured = Certificate(
        facility=run.facility.name,
        measured_on=datetime.now(timezone.utc).date().isoformat(),
        nodes=placement.node_count,
        ranks_per_node=placement.local_world_size,
        devices=devices_of_a_node(world, placement, run.facility.node.devices) if device else 0,
        device=device.name if device else "cpu",
        compute_capability=_capability(device),
        device_memory_gib=round(device.total_memory / 2**30, 1) if device else None,
        driver=driver_version(run.facility.node.device),
        torch=torch.__version__,
        gemm_tflops=round(min(gathered(world, each.gemm_tflops)), 3),
        gemm_dtype=str(gemm_dtype(world.device)).removeprefix("torch."),
        bandwidth_in_node_gb_s=_slowest(world, _bus_gb_s(world, in_node)),
        bandwidth_between_nodes_gb_s=_slowest(world, _bus_gb_s(world, between)),
        memory_gb_s=_slowest(world, each.memory_gb_s),
        link_in_node_gb_s=_slowest(world, each.link_in_node_gb_s),
        link_between_nodes_gb_s=_slowest(world, each.link_between_nodes_gb_s),
        file_write_gb_s=round(gathered(world, _file_write_gb_s(world, run_folder))[0], 3),
        transports=transports,
        image=run.image.file.name if run.image.file else "none",
        faults=faults,
    )
    return asdict(measured)


def devices_of_a_node(world: World, placement: Placement, stated: int) -> int | None:
    """How many its ranks see together, where each may be shown its own alone; on the poorest node.

    None where that is fewer than stated, and so are the ranks: the others were not asked for.
    """
    own = placement.node_rank, torch.cuda.device_count(), device_id(world)
    visible: dict[int, int] = {}
    ids: dict[int, set[str]] = {}
    for node, count, identity in gathered(world, own):
        visible[node] = max(count, visible.get(node, 0))
        ids.setdefault(node, set()).add(identity)
    least = min(max(visible[node], len(ids[node])) for node in ids)
    return None if least < stated and placement.local_world_size < stated else least


def device_id(world: World) -> str:
    """What tells two devices of a host apart."""
    return str(getattr(torch.cuda.get_device_properties(world.device), "uuid", world.device))


def _on_gpu(world: World) -> bool:
    return world.device.type == "cuda"


def _capability(device: Any) -> str | None:
    if device is None:
        return None
    gfx = getattr(device, "gcnArchName", "").partition(":")[0]
    return gfx if gfx.startswith("gfx") else f"{device.major}.{device.minor}"


def _groups(world: World, placement: Placement) -> tuple[Any, Any]:
    """This rank's group inside its node, and of the first ranks of the first two nodes.

    Every rank takes part in making every group; None where a group would have one rank alone.
    """
    if world.size == 1:
        return None, None
    node_ranks = gathered(world, placement.node_rank)
    nodes = [[r for r, n in enumerate(node_ranks) if n == node] for node in sorted({*node_ranks})]
    own = None
    for ranks in (ranks for ranks in nodes if len(ranks) > 1):
        group = dist.new_group(ranks)
        own = group if world.rank in ranks else own
    pair = [ranks[0] for ranks in nodes[:2]]
    between = dist.new_group(pair) if len(pair) == 2 else None
    return own, between if world.rank in pair else None


def _bus_gb_s(world: World, group: Any) -> float | None:
    """What a link carries of a large all_reduce in this group, as nccl-tests count it."""
    if group is None:
        return None
    message = torch.ones(MESSAGE_BYTES[world.device.type] // 4, device=world.device)
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        dist.all_reduce(message, group=group)
        if _on_gpu(world):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    rate = MESSAGE_BYTES[world.device.type] / statistics.median(seconds[1:]) / 1e9
    return rate * bus_factor("all_reduce", dist.get_world_size(group))


def _slowest(world: World, rate: float | None) -> float | None:
    """The slowest of all ranks that measured."""
    rates = [each for each in gathered(world, rate) if each is not None]
    return round(min(rates), 3) if rates else None


def _file_write_gb_s(world: World, folder: Path) -> float:
    """What one process writes to the run's file system, on the disk when it is done."""
    if world.rank != 0:
        return 0.0
    file = folder / "first-day.partial"
    content = bytes(FILE_BYTES)
    started = time.perf_counter()
    try:
        with open(file, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        return FILE_BYTES / (time.perf_counter() - started) / 1e9
    finally:
        file.unlink(missing_ok=True)
