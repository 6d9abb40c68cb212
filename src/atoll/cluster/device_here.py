"""Whether this machine can have the devices that a run on it asks for, without loading torch."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from atoll.errors import UserError
from atoll.settings import Run

# kind -> what each machine with such devices has some of: nodes and files of the driver (also those
# of Tegra boards and of WSL), or a program that comes with it
SIGNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cuda": (
        ("dev/nvidia*", "dev/nvhost*", "dev/nvmap", "dev/nvgpu", "dev/dxg", "proc/driver/nvidia"),
        ("nvidia-smi",),
    ),
    "rocm": (
        ("dev/kfd", "dev/dxg", "sys/module/amdgpu"),
        ("rocm-smi", "amd-smi", "rocminfo"),
    ),
}
QUEUES = ("sbatch", "qsub", "bsub")  # where there is one, the devices may be of other machines


def check_device(run: Run, root: Path = Path("/")) -> None:
    """Refuse a run that takes place on this machine alone, on devices that it cannot have.

    Nothing is refused where it cannot be known: on a machine with a scheduler, where ranks start
    over ssh, or in a container with a /dev of its own, which has no kmsg.
    """
    node = run.facility.node
    if run.facility.scheduler != "none" or run.launcher.name == "ssh" or node.device not in SIGNS:
        return
    if not (root / "dev" / "kmsg").exists() or any(map(shutil.which, QUEUES)):
        return
    files, programs = SIGNS[node.device]
    if any(map(shutil.which, programs)) or any(any(root.glob(name)) for name in files):
        return
    raise UserError(
        f"facility.node.device={node.device}, and this machine has no {node.device} device: no "
        f"{', '.join(f'/{name}' for name in files)}, nor {', '.join(programs)}",
        "facility.node.device=cpu trains on processors; on a cluster choose its facility=NAME",
    )
