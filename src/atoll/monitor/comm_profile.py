"""What ranks send each other in a step, as observed: at the collectives, and on the wire."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import RecordScope

from atoll.monitor.observers import Observer, StepRecord, WatchedRun, Write
from atoll.plan.traffic import rounded
from atoll.sharding.process_group import barrier

# how the profiler calls the work of a backend, on the host and on the device
PREFIXES = ("gloo:", "nccl:", "ncclDevKernel", "rcclDevKernel")
DTYPE_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4}
MOST_COLLECTIVES = 20  # in a record
NET, INFINIBAND = Path("/proc/net/dev"), Path("/sys/class/infiniband")
INFINIBAND_UNIT = 4  # bytes of one count of port_xmit_data (the kernel's sysfs-class-infiniband)


class CommunicationProfile(Observer):
    """Profiles one step: not the first of a start, which warms up, and not again.

    A call is counted with the bytes of the tensors a rank gives to it, whatever the backend then
    makes of it; the bytes on the wire are what the node's interfaces sent, divided among its ranks.
    """

    def __init__(self, watched: WatchedRun, write: Write) -> None:
        self.watched, self.write = watched, write
        alone = watched.world.size == 1
        self.profiled_step = None if alone else watched.resumed_step + 2
        # of a step, in which a collective ran; None: not known yet
        self.seconds: float | None = 0.0 if alone else None

    def before_step(self, step: int) -> None:
        if step != self.profiled_step:
            return
        # nobody's earlier or later step is counted
        barrier(self.watched.world)
        self.sent_before = wire_bytes()
        start_profiler()

    def after_step(self, update: StepRecord) -> None:
        if update.step != self.profiled_step:
            return
        events = [e for e in stop_profiler() if e.name().startswith(PREFIXES)]
        barrier(self.watched.world)
        sent_bytes = wire_bytes() - self.sent_before
        spans = [(e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3) for e in events]
        self.seconds = _covered(spans) / 1e6
        self.write(
            {
                "event": "communication",
                "step": update.step,
                "expected_bytes": rounded(self.watched.communication_bytes),
                "wire_bytes": round(sent_bytes / self.watched.run.ranks_per_node),
                "seconds": self.seconds,
                "collectives": collectives(events)[:MOST_COLLECTIVES],
            }
        )


def start_profiler() -> None:
    """Record what backends do for collectives, and on devices their kernels.

    torch.profiler would record every operation of a step too: about 1 kB of each, on every rank.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce itself on every rank
    device = "cuda" if torch.cuda.is_available() else None
    settings = torch.autograd.profiler.profile(
        use_device=device, record_shapes=True, use_kineto=True
    )
    config, activities = settings.config(), settings.kineto_activities
    torch.autograd._prepare_profiler(config, activities)
    scopes = {RecordScope.USER_SCOPE}
    torch.autograd._enable_profiler(config, activities, scopes)  # type: ignore[call-arg]


def stop_profiler() -> list[Any]:
    """What was recorded; nothing of it is kept."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a kernel that still runs would not be among it
    return list(torch.autograd._disable_profiler().events())


def collectives(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Each kind of call by name, shape and dtype, the most bytes first."""
    calls = Counter(
        (event.name(), tuple(shape), dtype)
        for event in events
        for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False)
        if shape and dtype in DTYPE_BYTES
    )
    rows = [
        {
            "collective": name,
            "shape": list(shape),
            "dtype": dtype,
            "calls": count,
            "bytes": count * DTYPE_BYTES[dtype] * math.prod(shape),
        }
        for (name, shape, dtype), count in calls.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def wire_bytes() -> int:
    """What all interfaces of this node have sent so far, InfiniBand's own counters included."""
    lines = NET.read_text().splitlines()[2:] if NET.exists() else []
    sent = sum(int(line.rpartition(":")[2].split()[8]) for line in lines)
    ports = INFINIBAND.glob("*/ports/*/counters/port_xmit_data")
    return sent + INFINIBAND_UNIT * sum(map(_counted, ports))


def _counted(counter: Path) -> int:
    """A counter's number; 0 where it is none, as `N/A (no PMA)` of iWARP's devices."""
    try:
        return int(counter.read_text())
    except (OSError, ValueError):
        return 0


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
