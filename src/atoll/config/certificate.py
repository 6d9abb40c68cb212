"""Where a facility's figures come from: measured by a doctor's job, or as its documents say."""

import json
from typing import Any

from atoll import run_dir
from atoll.errors import UserError
from atoll.settings import Run

SHOWN = {
    "gemm_tflops": "{} TFLOP/s a device",
    "bandwidth_in_node_gb_s": "{} GB/s in a node",
    "bandwidth_between_nodes_gb_s": "{} GB/s between nodes",
    "file_write_gb_s": "{} GB/s to files",
}


def read(run: Run) -> dict[str, Any] | None:
    """The facility's certificate; None where no doctor's job has written one.

    Raises `UserError` for a file that is no certificate.
    """
    file = run_dir.certificate(run)
    if not file.is_file():
        return None
    try:
        measured = json.loads(file.read_text())
        assert measured["facility"] == run.facility.name and measured["measured_on"]
    except (ValueError, TypeError, KeyError, AssertionError):
        raise UserError(
            f"{file} is no certificate of {run.facility.name}",
            f"remove it; atoll doctor facility={run.facility.name} --job writes one",
        ) from None
    return dict(measured)


LINKS = ("bandwidth_in_node_gb_s", "bandwidth_between_nodes_gb_s")  # of devices, by a doctor's job


def rates(run: Run) -> dict[str, Any] | None:
    """By `atoll plan --measure`, and `links` by a doctor's job; None: nothing was measured here."""
    measured = read(run) or {}
    found = dict(measured.get("rates") or {})
    if measured.get("device", "cpu") != "cpu":
        links = {name: measured[name] for name in LINKS if measured.get(name)}
        found |= {"links": links} if links else {}
    return found or None


def calibration(run: Run) -> dict[str, Any] | None:
    """What finished runs taught here; None where none did."""
    factors: dict[str, Any] | None = (read(run) or {}).get("calibration")
    return factors


def file_write_gb_s(run: Run) -> float | None:
    """Of one node: as stated, else as a doctor's job measured; None: not known."""
    stated = run.facility.node.file_write_gb_s
    measured: float | None = (read(run) or {}).get("file_write_gb_s")
    return stated or measured


def origin(run: Run) -> str:
    """One line: measured on a date, with its figures, or as documented."""
    measured = read(run) or {}
    shown = [text.format(measured[key]) for key, text in SHOWN.items() if measured.get(key)]
    shown += ["rates by atoll plan --measure"] if "rates" in measured else []
    if not shown:
        checked = run.facility.checked_on
        return f"as documented{f', read on {checked}' if checked else ''}"
    return f"measured on {measured['measured_on']}: {', '.join(shown)}"


def contradictions(run: Run) -> list[tuple[str, str]]:
    """What was measured otherwise than the facility states: each as (setting, both values)."""
    measured, node = read(run) or {}, run.facility.node
    stated = {"compute_capability": node.compute_capability}
    if node.device != "cpu":
        stated |= {"devices": str(node.devices)}
    return [
        (f"facility.node.{key}", f"stated {value}, measured {measured[key]}")
        for key, value in stated.items()
        if value is not None and measured.get(key) and str(measured[key]) != value
    ]
