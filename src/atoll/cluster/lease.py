"""Which job holds a run, as `job.sh` writes it down: read here, taken and renewed there."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll import run_dir

STALE_SECONDS = 60.0  # without renewal, as watch_seconds of job.sh


@dataclass(frozen=True)
class Lease:
    """Who holds, or last held, a run; `alive`: as far as this machine can tell."""

    scheduler: str
    job: str
    node: str
    alive: bool


def lease_of(run_folder: Path) -> Lease | None:
    """The lease of a run; None if no job ever took one."""
    folder = run_dir.lease_folder(run_folder)
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = [int(name) for name in names if name.isdecimal()]
    with suppress(OSError):  # taken over while we look
        file = folder / str(max(numbers, default=0))
        words, age_seconds = file.read_text().split(), time.time() - file.stat().st_mtime
        if len(words) >= 7:
            scheduler, job, _, node, pid, start, machine = words[:7]
            ended = words[7:8] == ["ended"]
            here = machine == _machine()
            alive = _started(pid) == start if here else age_seconds < STALE_SECONDS
            return Lease(scheduler, job, node, alive and not ended)
    return None


def _machine() -> str:
    """One boot and one space of process ids, within which a number is one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def _started(pid: str) -> str | None:
    """When a process started, in ticks of the kernel (proc's manual, stat); None without one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    words = stat.rpartition(") ")[2].split()
    return None if words[0] == "Z" else words[19]  # a zombie has ended
