"""Joules that devices and processors used while a run trained, each with where it comes from.

`measured: NVML`, the counter of an NVIDIA device; `measured: RAPL`, of a processor's packages
with all that runs on them; `estimated: N W x time` where no counter of the device can be read.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.monitor.observers import Observer, WatchedRun, Write
from atoll.settings import Node
from atoll.sharding.process_group import gathered

RAPL = Path("/sys/class/powercap")
# well below the time in which a package's counter wraps around (minutes, under load)
SAMPLE_SECONDS = 60.0

# what one device may draw, from the vendors' data sheets; MI250X per GCD
DEVICE_WATTS = {"A100-SXM": 400.0, "H100 80GB HBM3": 700.0, "MI250X": 280.0, "V100-SXM": 300.0}

Counter = Callable[[], float | None]  # joules since some time in the past
Figure = tuple[float, str]  # joules, and where they come from


@dataclass(frozen=True)
class Spent:
    """What one rank used, and which device that was, where this is known."""

    seconds: float
    uuid: str | None
    device: Figure | None
    package: Figure | None  # of the whole node; its first rank alone knows


class EnergyCounter(Observer):
    """Records what all ranks used from the first step of a start to its last, where it is known."""

    def __init__(self, watched: WatchedRun, write: Write, stack: ExitStack) -> None:
        self.watched, self.write, self.stack = watched, write, stack
        self.spent: Callable[[], Spent] | None = None
        self.first_step = self.last_step = 0

    def before_step(self, step: int) -> None:
        self.last_step = step
        if self.spent is None:
            run, world = self.watched.run, self.watched.world
            first_of_node = world.rank % run.ranks_per_node == 0
            counting = counted(run.facility.node, world.device, first_of_node)
            self.spent, self.first_step = self.stack.enter_context(counting), step

    def on_end(self) -> None:
        if self.spent is None:
            return
        every = gathered(self.watched.world, self.spent())
        used = totals(every, self.watched.run.ranks_per_node)
        if used:
            place = {"event": "energy", "step": self.last_step, "first_step": self.first_step}
            self.write(place | used)


@contextmanager
def counted(
    node: Node, device: torch.device, first_of_node: bool, rapl: Path = RAPL
) -> Iterator[Callable[[], Spent]]:
    """A function that returns what was used since the `with` began."""
    uuid, counter = nvml_counter(device)
    watts = device_watts(node, device)
    with sampled(packages(rapl) if first_of_node else []) as package_joules:
        started, before = time.monotonic(), counter()

        def spent() -> Spent:
            seconds, now, joules = time.monotonic() - started, counter(), package_joules()
            figure = None
            if before is not None and now is not None:
                figure = (now - before, "measured: NVML")
            elif watts is not None:
                figure = (watts * seconds, f"estimated: {watts:g} W x time")
            package = None if joules is None else (joules, "measured: RAPL")
            return Spent(seconds, uuid, figure, package)

        yield spent


def totals(spent: Sequence[Spent], ranks_per_node: int) -> dict[str, Any]:
    """The joules of all ranks as a record; empty where nothing is known.

    A device that several ranks share counts once. A sum that misses one of them is no sum.
    """
    devices = {rank.uuid or str(number): rank.device for number, rank in enumerate(spent)}
    device = _sum(list(devices.values()))
    package = _sum([rank.package for rank in spent[::ranks_per_node]])
    if device is None and package is None:
        return {}
    return {
        "seconds": max(rank.seconds for rank in spent),
        "device_joules": device and device[0],
        "device_source": device and device[1],
        "package_joules": package and package[0],
        "package_source": package and package[1],
    }


def _sum(figures: Sequence[Figure | None]) -> Figure | None:
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(figures) or not known:
        return None
    return sum(joules for joules, _ in known), "; ".join(sorted({source for _, source in known}))


def device_watts(node: Node, device: torch.device) -> float | None:
    """What one device may draw: as the facility says, or by its name."""
    if node.device_watts is not None or device.type == "cpu":
        return node.device_watts
    name = torch.cuda.get_device_name(device)
    return next((watts for known, watts in DEVICE_WATTS.items() if known in name), None)


def nvml_counter(device: torch.device) -> tuple[str | None, Counter]:
    """The device's UUID and its counter of energy, which gives None where NVML has none.

    By UUID, because NVML does not know of CUDA_VISIBLE_DEVICES and counts every device.
    """
    if device.type == "cpu" or torch.version.hip:
        return None, lambda: None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        import pynvml
    except ImportError:
        return uuid, lambda: None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:  # a part of a device (MIG), or one older than Volta
        return uuid, lambda: None
    return uuid, lambda: _unless(
        pynvml.NVMLError, lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    )


def _unless(error: type[Exception], read: Callable[[], float]) -> float | None:
    """A counter that fails in the end costs its figure, not the run."""
    try:
        return read()
    except error:
        return None


def packages(rapl: Path) -> list[Path]:
    """The domains of whole packages; none where they may not be read (root alone, often)."""
    domains = [p for p in rapl.glob("intel-rapl:*") if re.fullmatch(r"intel-rapl:\d+", p.name)]
    try:
        domains = [p for p in domains if (p / "name").read_text().startswith("package")]
        for domain in domains:
            _microjoules(domain)
    except OSError:
        return []
    return sorted(domains)


@contextmanager
def sampled(domains: Sequence[Path]) -> Iterator[Counter]:
    """Joules since the `with` began; read often enough that no wrap-around is missed."""
    if not domains:
        yield lambda: None
        return
    limits = [int((path / "max_energy_range_uj").read_text()) for path in domains]
    last, total = [_microjoules(path) for path in domains], 0
    lock, over = threading.Lock(), threading.Event()

    def joules() -> float:
        nonlocal last, total
        with lock:
            now = [_microjoules(path) for path in domains]
            total += sum(map(since, last, now, limits))
            last = now
            return total / 1e6

    def keep_sampling() -> None:
        while not over.wait(SAMPLE_SECONDS):
            _unless(OSError, joules)

    thread = threading.Thread(target=keep_sampling, name="rapl", daemon=True)
    thread.start()
    try:
        yield lambda: _unless(OSError, joules)
    finally:
        over.set()
        thread.join()


def since(before: int, now: int, limit: int) -> int:
    """What a counter counted that begins at 0 again when it reaches `limit`."""
    return now - before if now >= before else now - before + limit


def _microjoules(domain: Path) -> int:
    return int((domain / "energy_uj").read_text())
