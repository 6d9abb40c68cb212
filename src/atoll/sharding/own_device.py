"""The device of this rank: of the kind that the facility states, or a refusal that says why."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.errors import UserError
from atoll.launch import Placement, device_index
from atoll.settings import Run


@dataclass(frozen=True)
class Vendor:
    """What there is to look at when none of a vendor's devices is visible."""

    driver: Path  # there where the kernel's driver is loaded; it holds its version
    run_flag: str
    masks: tuple[str, ...]  # variables that hide devices


VENDORS = {
    "cuda": Vendor(
        Path("/proc/driver/nvidia/version"),
        "--nv",
        ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    ),
    "rocm": Vendor(
        Path("/sys/module/amdgpu/version"),
        "--rocm",
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    ),
}

# of ranks that one launcher of ours started: where one sees no device, its neighbours see none
ONE_ENVIRONMENT = ("fork", "local")


def own_device(run: Run, placement: Placement) -> torch.device:
    """The device of this rank, made the current one.

    Raises `UserError` where the facility states devices and none is visible: a run never goes on
    on the processors unless facility.node.device=cpu says so. Where that holds for all ranks of a
    node, one says it.
    """
    kind = run.facility.node.device
    if kind == "cpu":
        if placement.rank == 0 and torch.cuda.is_available():
            print("facility.node.device=cpu leaves the devices here idle", flush=True)
        return torch.device("cpu")
    if kind not in VENDORS:
        raise UserError(
            f"facility.node.device={kind}: no backend of ours runs on it",
            f"facility.node.device={' or '.join([*VENDORS, 'cpu'])}",
        )
    count = torch.cuda.device_count() if torch_is_for(kind) else 0
    if not count or not torch.cuda.is_available():
        if placement.local_rank and placement.source in ONE_ENVIRONMENT:
            raise SystemExit(2)  # the node's first rank says it, and has the time to
        raise _none_visible(run, placement, os.environ)
    index = device_index(placement.local_rank, placement.local_world_size, count)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def driver_version(kind: str) -> str | None:
    """The version of the kernel's driver for these devices on this node, where it is loaded."""
    file = VENDORS[kind].driver if kind in VENDORS else None
    found = re.search(r"\d+\.\d+(\.\d+)*", file.read_text()) if file and file.exists() else None
    return found[0] if found else None


def torch_is_for(kind: str) -> bool:
    """Whether this torch was built for devices of that kind."""
    return bool(torch.version.hip if kind == "rocm" else torch.version.cuda)


def _none_visible(run: Run, placement: Placement, environment: Mapping[str, str]) -> UserError:
    kind = run.facility.node.device
    vendor, flags = VENDORS[kind], run.image.run_flags
    masks = [f"{name}={environment[name]!r}" for name in vendor.masks if name in environment]
    facts = [
        f"torch {torch.__version__} is {'' if torch_is_for(kind) else 'not '}built for it",
        f"its driver is {'loaded' if vendor.driver.exists() else 'not loaded'}",
        f"image={run.image.name} runs with {' '.join(flags) or 'no flags'}",
        ", ".join(masks) or "no variable hides devices",
    ]
    missing = run.image.file is not None and vendor.run_flag not in flags
    hints = [f"image.run_flags=[{vendor.run_flag}]"] if missing else []
    hints += ["ask the scheduler for devices in facility.submit"]
    hints += ["facility.node.device=cpu trains on processors"]
    where = f"rank {placement.rank} on {socket.gethostname()}"
    return UserError(
        f"no {kind} device is visible to {where}: {'; '.join(facts)}", "; ".join(hints)
    )
