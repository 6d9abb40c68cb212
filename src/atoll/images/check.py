"""Does an image fit this run and this node: there, of the right architecture, for this driver."""

import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from atoll import run_dir
from atoll.commands import run_command
from atoll.errors import UserError
from atoll.images import sif
from atoll.settings import Run, load_run
from atoll.settings.capability import runs_on

# Where the header of a SIF file has its magic word and its architecture, in two digits: sif.HEADER.
MAGIC_AT, ARCHITECTURE_AT = 32, 45
ARCHITECTURES = {b"02": "x86_64", b"04": "aarch64"}
# NVIDIA's driver branch that a CUDA major version needs at least (CUDA Compatibility, minor
# version compatibility), and with the forward-compatible libraries of the image first.
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
LEAST_DRIVER_COMPAT = {11: 418, 12: 450, 13: 535}
# AMD tests a driver with the userland of two releases before and after its own (ROCm's user and
# kernel-space support matrix, and a site's own guide of its driver 6.3: 6.1 to 7.0).
ROCM_RELEASES = ["5.5", "5.6", "5.7", "6.0", "6.1", "6.2", "6.3", "6.4", "7.0", "7.1", "7.2"]
MOST_ROCM_RELEASES = 2
LABELS = Path("/.singularity.d/labels.json")


def check_image(run: Run) -> None:
    """On the login node: refuse an image that is not there or is for another architecture."""
    image = run.image
    if image.file is None:
        return
    build = f"build it: make image-{image.name}"
    if not image.file.is_file():
        raise UserError(f"no image {image.file}", f"{build}, or name one: image.file=FILE")
    with open(image.file, "rb") as file:
        header = file.read(ARCHITECTURE_AT + 2)
    if header[MAGIC_AT : MAGIC_AT + len(sif.MAGIC)] != sif.MAGIC:
        raise UserError(f"{image.file} is no SIF image", build)
    inside = ARCHITECTURES.get(header[ARCHITECTURE_AT:], "another architecture")
    check_architecture(inside, run.facility.node.architecture, str(image.file))
    if image.verify_key and not image.verify_key.is_file():
        raise UserError(f"no key {image.verify_key}", "image.verify_key=FILE, the public key")
    if run.facility.driver:
        check_for_driver(run, sif.labels(image.file), run.facility.driver)


def check_architecture(inside: str, wanted: str, image: str) -> None:
    """Refuse an image whose programs the node cannot run."""
    if inside != wanted:
        raise UserError(
            f"{image} is for {inside}, the nodes are {wanted}",
            f"build it on a machine with {wanted}, or name another: image.file=FILE",
        )


def check_inside(run_folder: Path) -> None:
    """In the job, inside the image: refuse another architecture, an older driver, no package."""
    run = load_run(run_dir.settings_file(run_folder))
    node = run.facility.node
    check_architecture(platform.machine(), node.architecture, str(run.image.file))
    labels = json.loads(LABELS.read_text())
    device = nvidia_capability() or node.compute_capability
    if device and labels.get("atoll.devices"):
        check_devices(device, labels["atoll.devices"].split())
    driver = (run.image.device == "cuda" and nvidia_driver()) or run.facility.driver
    if driver:
        check_for_driver(run, labels, driver)


def check_for_driver(run: Run, labels: Mapping[str, str], driver: str) -> None:
    """Refuse an image whose CUDA or ROCm, by its labels, the driver does not run."""
    if run.image.device == "cuda" and (cuda := labels.get("atoll.cuda")):
        check_driver(cuda, driver, compatible=labels.get("atoll.cuda.compat") == "yes")
    if run.image.device == "rocm" and (rocm := labels.get("atoll.rocm")):
        check_rocm(rocm, driver)


def check_devices(device: str, built_for: list[str]) -> None:
    """Refuse an image whose torch has no kernels for the device that is here."""
    if not runs_on(device, built_for):
        raise UserError(
            f"the image's torch was built for {', '.join(built_for)}; the device here is {device}",
            "an image for it: image=cuda12 has 5.0 to 9.0, docs/facilities.md names the others",
        )


def check_rocm(rocm: str, driver: str) -> None:
    """Refuse a ROCm more than two releases away from the driver's, where both are known."""
    inside, outside = (".".join(version.split(".")[:2]) for version in (rocm, driver))
    if not {inside, outside} <= set(ROCM_RELEASES):
        return
    at = ROCM_RELEASES.index(outside)
    near = ROCM_RELEASES[max(0, at - MOST_ROCM_RELEASES) : at + MOST_ROCM_RELEASES + 1]
    if inside not in near:
        raise UserError(
            f"the image has ROCm {inside}; the driver here is of ROCm {outside}, "
            f"which runs {near[0]} to {near[-1]}",
            f"an image with ROCm {outside}: another `from` in containers/bases",
        )


def check_driver(cuda: str, driver: str, compatible: bool) -> None:
    """Refuse a CUDA that the node's driver cannot run (CUDA Compatibility, table 3)."""
    major, branch = int(cuda.split(".")[0]), int(driver.split(".")[0])
    table = LEAST_DRIVER_COMPAT if compatible else LEAST_DRIVER
    least = table.get(major, branch + 1 if major > max(table) else 0)
    if branch >= least:
        return
    compat = LEAST_DRIVER_COMPAT.get(major, least)
    hint = (
        "image=cuda_compat brings driver libraries for it"
        if compat <= branch and not compatible
        else f"an image with an older CUDA: another `from` in containers/bases (driver {driver})"
    )
    raise UserError(
        f"the image has CUDA {cuda}, which needs driver {least}; here is {driver}", hint
    )


def nvidia_capability() -> str | None:
    """The compute capability of the first device here, as NVIDIA's own tool states it."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = run_command(query, timeout_seconds=30)
    found = re.match(r"\d+\.\d", done.stdout)
    return found[0] if found and done.returncode == 0 else None


def nvidia_driver() -> str | None:
    """The version of NVIDIA's kernel driver on this node, as the kernel states it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else None
