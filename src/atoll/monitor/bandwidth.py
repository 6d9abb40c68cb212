"""How fast the ranks of a world talk: each collective at several message sizes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from atoll.sharding.process_group import World

# Sizes of the whole message; a processor's links are slower, and gloo's buffers are copied.
SIZES_BYTES = {"cpu": [2**10, 2**14, 2**18, 2**22, 2**24], "cuda": [2**i for i in range(10, 31, 4)]}
REPEATS = 5
LONGEST_SECONDS = 4.0  # of one size: the next one would take long
# torch 2.13 calls them by new names and warns of the old ones
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Speed:
    """One collective at one size; bus: what every link carried, as nccl-tests count it."""

    collective: str
    size_bytes: int
    seconds: float
    algorithm_gb_s: float
    bus_gb_s: float


def measure(world: World) -> list[Speed]:
    """Time each collective at each size, until a size takes long."""
    speeds = []
    for name in COLLECTIVES:
        for size_bytes in SIZES_BYTES[world.device.type]:
            speeds.append(timed(world, name, size_bytes))
            if speeds[-1].seconds * REPEATS > LONGEST_SECONDS:
                break
    return speeds


def timed(world: World, name: str, size_bytes: int) -> Speed:
    """The median of several repeats, of the slowest rank each time."""
    call = COLLECTIVES[name](world, max(world.size, size_bytes // 4 // world.size * world.size))
    call()
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        call()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor([time.perf_counter() - started], device=world.device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        seconds.append(spent.item())
    median = statistics.median(seconds)
    algorithm = size_bytes / median / 1e9
    return Speed(name, size_bytes, median, algorithm, algorithm * bus_factor(name, world.size))


def bus_factor(name: str, ranks: int) -> float:
    """What a link carries for each byte of the message (nccl-tests, doc/PERFORMANCE.md)."""
    return (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks


def _all_reduce(world: World, numel: int) -> Callable[[], Any]:
    whole = torch.ones(numel, device=world.device)
    return lambda: dist.all_reduce(whole)


def _all_gather(world: World, numel: int) -> Callable[[], Any]:
    whole = torch.empty(numel, device=world.device)
    part = torch.ones(numel // world.size, device=world.device)
    return lambda: GATHER(whole, part)


def _reduce_scatter(world: World, numel: int) -> Callable[[], Any]:
    whole = torch.ones(numel, device=world.device)
    part = torch.empty(numel // world.size, device=world.device)
    return lambda: SCATTER(part, whole)


# numel counts the elements of the whole message, which the ranks divide among them
COLLECTIVES: dict[str, Callable[[World, int], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
