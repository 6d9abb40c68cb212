"""What ranks send each other in a step, as observed: at the collectives, and on the wire."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atoll.sharding.process_group import World

# how the profiler calls the work of a backend, on the host and on the device
PREFIXES = ("gloo:", "nccl:", "ncclDevKernel", "rcclDevKernel")
DTYPE_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4}
NET, INFINIBAND = Path("/proc/net/dev"), Path("/sys/class/infiniband")
INFINIBAND_UNIT = 4  # bytes of one count of port_xmit_data (the kernel's sysfs-class-infiniband)


@dataclass
class Observed:
    """One step: seconds in which a collective ran, calls and bytes of each, bytes sent by a rank.

    A call is counted with the bytes of the tensors a rank gives to it, whatever the backend then
    makes of it; `wire_bytes` is what the node's interfaces sent, divided among its ranks.
    """

    seconds: float = 0.0
    wire_bytes: float = 0.0
    # name, shape, dtype -> calls
    calls: dict[tuple[str, tuple[int, ...], str], int] = field(default_factory=dict)

    def collectives(self) -> list[dict[str, Any]]:
        """Each kind of call, the most bytes first."""
        rows = [
            {
                "collective": name,
                "shape": list(shape),
                "dtype": dtype,
                "calls": count,
                "bytes": count * _bytes(shape, dtype),
            }
            for (name, shape, dtype), count in self.calls.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])


@contextmanager
def observed(world: World, active: bool, ranks_per_node: int) -> Iterator[Observed]:
    """While active, count and time; the result is filled at the end. All ranks call it."""
    found = Observed()
    if not active or world.size == 1:
        yield found
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce itself on every rank
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    dist.barrier(group=world.host_group)  # nobody's earlier or later step is counted
    before = wire_bytes()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiled:
        yield found
    dist.barrier(group=world.host_group)
    found.wire_bytes = (wire_bytes() - before) / ranks_per_node
    events = [e for e in _events(profiled) if e.name().startswith(PREFIXES)]
    spans = [(e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3) for e in events]
    found.seconds = _covered(spans) / 1e6
    for event in events:
        for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False):
            if shape and dtype in DTYPE_BYTES:
                key = (event.name(), tuple(shape), dtype)
                found.calls[key] = found.calls.get(key, 0) + 1


def wire_bytes() -> int:
    """What all interfaces of this node have sent so far, InfiniBand's own counters included."""
    lines = NET.read_text().splitlines()[2:] if NET.exists() else []
    sent = sum(int(line.rpartition(":")[2].split()[8]) for line in lines)
    ports = INFINIBAND.glob("*/ports/*/counters/port_xmit_data")
    return sent + INFINIBAND_UNIT * sum(int(port.read_text()) for port in ports)


def _events(profiled: Any) -> list[Any]:
    results = profiled.profiler.kineto_results
    return [] if results is None else list(results.events())


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
