"""What the ranks of a job see and how fast they talk: the inside half of `atoll doctor`."""

import json
import os
import platform
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from atoll import run_dir
from atoll.launch import Placement
from atoll.monitor.bandwidth import Speed, measure
from atoll.monitor.first_day import certificate, device_id
from atoll.settings import Facility, load_run
from atoll.sharding.process_group import World, gathered, joined, say
from atoll.sharding.transport import FABRICS, HINT, SOCKET, networks_in


@dataclass(frozen=True)
class Report:
    """What one rank sees."""

    rank: int
    host: str
    visible_devices: int
    device: str
    device_id: str  # what tells two devices of a host apart
    cores: list[int]
    torch: str
    runtime: str
    missing_interfaces: list[str]


def main(run_folder: Path, placement: Placement) -> int:
    """Report, measure, compare with what was stated; 1 if something is wrong."""
    run = load_run(run_dir.settings_file(run_folder))
    with joined(run, placement) as world:
        reports = gathered(world, report(world, run.facility))
        speeds = measure(world) if world.size > 1 else []
        transports = sorted({word for words in gathered(world, transport(world)) for word in words})
        wrong = faults(reports, transports, run.facility)
        found = [found for found, _ in wrong]
        measured = certificate(run, run_folder, world, placement, transports, found)
        if world.rank == 0:
            run_dir.add_to_certificate(run, measured)
            content = {
                "reports": [asdict(report) for report in reports],
                "transports": transports,
                "speeds": [asdict(speed) for speed in speeds],
                "wrong": [{"found": found, "hint": hint} for found, hint in wrong],
            }
            run_dir.write_whole(run_dir.doctor_file(run_folder), json.dumps(content, indent=1))
        say(world, as_text(reports, transports, speeds, wrong))
        say(world, f"certificate: {run_dir.certificate(run)}")
    return 1 if wrong else 0


def report(world: World, facility: Facility) -> Report:
    """What this rank sees of its node."""
    on_gpu = world.device.type == "cuda"
    properties = torch.cuda.get_device_properties(world.device) if on_gpu else None
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return Report(
        rank=world.rank,
        host=socket.gethostname(),
        visible_devices=torch.cuda.device_count() if on_gpu else 0,
        device=properties.name if properties else platform.machine(),
        device_id=device_id(world) if properties else "",
        cores=sorted(os.sched_getaffinity(0)),
        torch=torch.__version__,
        runtime=runtime if on_gpu else "processor",
        missing_interfaces=missing_interfaces(facility),
    )


def missing_interfaces(facility: Facility, known: Path = Path("/sys/class/net")) -> list[str]:
    """Interfaces that the facility's variables name and this node has not."""
    named = [
        facility.environment.get(f"{library}_SOCKET_IFNAME", "") for library in ("NCCL", "GLOO")
    ]
    words = [word.lstrip("=") for text in named for word in text.split(",") if word]
    there = {path.name for path in known.iterdir()} if known.is_dir() else set()
    # a word is a prefix of names, or with ^ what is not to be used
    return [
        word
        for word in words
        if not word.startswith("^") and not any(name.startswith(word) for name in there)
    ]


def transport(world: World) -> list[str]:
    """What carried the messages: of NCCL from its own log, else gloo's TCP."""
    if world.size == 1:
        return []
    if world.device.type != "cuda":
        return ["gloo over TCP"]
    return [f"network {name}" for name in world.networks]


def transports_in(text: str) -> list[str]:
    """The network plugin and the ways that lines of NCCL_DEBUG=INFO name."""
    return [f"network {name}" for name in networks_in(text)]


def faults(
    reports: list[Report], transports: list[str], facility: Facility
) -> list[tuple[str, str]]:
    """What is not as it should be, each with its hint."""
    wrong = []
    hosts = sorted({report.host for report in reports if not report.device_id})
    if facility.node.device != "cpu" and hosts:
        found = f"no device is visible on {', '.join(hosts)}"
        wrong.append((found, "see image.run_flags and facility.submit"))
    first_ranks: dict[tuple[str, str], int] = {}
    for report in reports:
        other = first_ranks.setdefault((report.host, report.device_id), report.rank)
        if report.device_id and other != report.rank:
            found = f"ranks {other} and {report.rank} share a device of {report.host}"
            wrong.append((found, "see facility.task_binding, and how the scheduler masks devices"))
    missing = sorted({name for report in reports for name in report.missing_interfaces})
    if missing:
        found = f"no interface {', '.join(missing)} on the nodes"
        wrong.append((found, "fix NCCL_SOCKET_IFNAME in facility.environment"))
    fast = [name for name in ("NCCL_NET", "FI_MR_CACHE_MONITOR") if name in facility.environment]
    fabric = facility.network.fabric
    if f"network {SOCKET}" in transports and (fast or fabric in FABRICS):
        known = f"{fast[0]} is set" if fast else f"the facility has {fabric}"
        wrong.append((f"NCCL fell back to TCP, though {known}", HINT))
    return wrong


def as_text(
    reports: list[Report], transports: list[str], speeds: list[Speed], wrong: list[tuple[str, str]]
) -> str:
    """The report as lines for a person."""
    ranks = [
        f"rank {report.rank}: {report.host}, {report.device}, "
        f"{report.visible_devices} devices visible, cores {_ranges(report.cores)}, "
        f"torch {report.torch}, {report.runtime}"
        for report in reports
    ]
    table = [
        f"{speed.collective:15} {speed.size_bytes:>12,} B {speed.seconds * 1e3:10.3f} ms "
        f"{speed.algorithm_gb_s:8.3f} GB/s, bus {speed.bus_gb_s:8.3f} GB/s"
        for speed in speeds
    ]
    carried = [f"carried by {', '.join(transports)}"] if transports else []
    ends = [f"wrong: {found}\n       {hint}" for found, hint in wrong] or ["nothing is wrong"]
    return "\n".join([*ranks, *carried, *table, *ends])


def _ranges(cores: list[int]) -> str:
    """0,1,2,5 as 0-2,5."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    )
