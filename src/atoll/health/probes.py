"""What a device and its links do: matrix products, memory, messages between pairs of ranks.

Random numbers are drawn from a generator of their own: a run's are left as they were.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from atoll.sharding.process_group import World, gathered

GEMM_SIZE = {"cpu": 512, "cuda": 8192}
COPY_BYTES = {"cpu": 2**24, "cuda": 2**30}
LINK_BYTES = {"cpu": 2**20, "cuda": 2**27}
# until a device draws what it draws in a run; a processor has nothing to warm up
WARM_UPS = {"cpu": 0, "cuda": 100}
# short ones and many of them: the best is one that nothing else disturbed
REPEATS = {"cpu": 10, "cuda": 5}


@dataclass(frozen=True)
class Figures:
    """What one rank measured; None: it has nobody to talk to so."""

    gemm_tflops: float
    memory_gb_s: float
    link_in_node_gb_s: float | None
    link_between_nodes_gb_s: float | None


def measure(world: World, nodes: Sequence[str]) -> Figures:
    """All ranks at once; `nodes`: the node of each, in order."""
    kind = world.device.type
    own = [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]
    first_come = list(dict.fromkeys(nodes))
    columns = [[r for r, node in enumerate(nodes) if node == name] for name in first_come]
    gathered(world, None)  # nobody measures while others are still busy otherwise
    gemm = measured_tflops(gemm_dtype(world.device), world.device, GEMM_SIZE[kind], WARM_UPS[kind])
    memory = copy_gb_s(world.device)
    gathered(world, None)
    in_node = [
        link_gb_s(world, own[partner])
        for partner in partners(own.index(world.rank), len(own))
        if partner is not None
    ]
    gathered(world, None)
    node, place = first_come.index(nodes[world.rank]), own.index(world.rank)
    others = [columns[p] for p in partners(node, len(columns)) if p is not None]
    between = [link_gb_s(world, ranks[place]) for ranks in others if place < len(ranks)]
    return Figures(gemm, memory, max(in_node, default=None), max(between, default=None))


def partners(number: int, count: int) -> list[int | None]:
    """With whom the n-th of so many talks, in rounds of pairs; None: with nobody in that round.

    Each has two partners where there are three or more: who is slow with both is slow itself.
    """
    if count == 1:
        return []
    rounds: list[list[tuple[int, int]]] = [
        [(first, (first + 1) % count) for first in range(start, count - 1 + start, 2)]
        for start in (0, 1)
    ]
    rounds.append([(count - 1, 0)] if count % 2 else [])
    if count == 2:
        rounds = rounds[:1]
    return [
        next((b if a == number else a for a, b in pairs if number in (a, b)), None)
        for pairs in rounds
        if pairs
    ]


def gemm_dtype(device: torch.device) -> torch.dtype:
    on_gpu = device.type == "cuda"
    return torch.bfloat16 if on_gpu and torch.cuda.is_bf16_supported() else torch.float32


def measured_tflops(
    dtype: torch.dtype, device: torch.device, size: int = 1024, warm_ups: int = 0
) -> float:
    """The best of a few matrix products of this size."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2)
    )
    for _ in range(warm_ups):
        torch.mm(a, b)
    return 2 * size**3 / best_seconds(device, lambda: torch.mm(a, b)) / 1e12


def copy_gb_s(device: torch.device) -> float:
    """Bytes that a copy inside the device's memory reads and writes."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_seconds(device, lambda: target.copy_(source)) / 1e9


def link_gb_s(world: World, partner: int) -> float:
    """Bytes each way between this rank and another, which does the same."""
    out = torch.zeros(LINK_BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    into = torch.empty_like(out)

    def exchange() -> None:
        calls = [dist.P2POp(dist.isend, out, partner), dist.P2POp(dist.irecv, into, partner)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    exchange()  # which connects them
    return out.numel() / best_seconds(world.device, exchange) / 1e9


def best_seconds(device: torch.device, call: Callable[[], object]) -> float:
    return min(seconds_of(device, call) for _ in range(REPEATS[device.type]))


def seconds_of(device: torch.device, call: Callable[[], object]) -> float:
    """Of one call, until the device has done all of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
