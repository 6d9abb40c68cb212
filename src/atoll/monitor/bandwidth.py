"""How fast the ranks of a world talk: each collective at several message sizes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.sharding.process_group import World

# Sizes of the whole message; a processor's links are slower, and gloo's buffers are copied.
SIZES_BYTES = {"cpu": [2**10, 2**14, 2**18, 2**22, 2**24], "cuda": [2**i for i in range(10, 31, 4)]}
REPEATS = 5
LONGEST_SECONDS = 4.0  # of one size: the next one would take long
# torch 2.13 calls them by new names and warns of the old ones
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# a call of (the whole message, a rank's part of it)
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "all_gather": lambda whole, part: GATHER(whole, part),
    "reduce_scatter": lambda whole, part: SCATTER(part, whole),
}


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
    part = torch.ones(max(1, size_bytes // 4 // world.size), device=world.device)
    whole = torch.ones(len(part) * world.size, device=world.device)
    call = COLLECTIVES[name]
    call(whole, part)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        call(whole, part)
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
