"""What benchmarks found: printed, and kept as lines of results/NAME.jsonl.

A row holds one comparison of medians: `case`, `unit`, `ours`, `peer` (its name), `peers` (its
number), `better` ("higher" or "lower"), `target` (for the ratio ours / peer; None: there is none)
and `turns`, all that was measured of both. Whatever else it holds is kept with it.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().with_name("results")
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "safetensors")
SIGNS = {"higher": "≥", "lower": "≤"}


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each way gives in each of its turns, in the order A B B A: a drift weighs on all."""
    turns: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            turns[name].append(ways[name]())
    return turns


def row(
    case: str,
    unit: str,
    ours: Sequence[float],
    peer: str,
    peers: Sequence[float],
    better: str,
    target: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A row from all turns of both."""
    turns = {"ours": list(ours), "peer": list(peers)}
    medians = {"ours": statistics.median(ours), "peers": statistics.median(peers)}
    known = {"case": case, "unit": unit, "peer": peer, "better": better, "target": target}
    return known | medians | {"turns": turns} | more


def kept() -> Iterator[dict[str, Any]]:
    """Every comparison that was recorded; a case's newest is its last."""
    for path in sorted(FOLDER.glob("*.jsonl")):
        rows = map(json.loads, path.read_text().splitlines())
        yield from (row for row in rows if "ours" in row)


def record(benchmark: str, rows: Sequence[dict[str, Any]]) -> bool:
    """Print the rows and append them to the benchmark's file; whether every target was met."""
    about = {"benchmark": benchmark, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about |= {"machine": machine(), "versions": versions()}
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / f"{benchmark}.jsonl", "a") as file:
        for each in rows:
            print(shown(each), flush=True)
            file.write(json.dumps(about | each) + "\n")
    return all(met(each) for each in rows)


def ratio(row: Mapping[str, Any]) -> float:
    return float(row["ours"]) / float(row["peers"])


def met(row: Mapping[str, Any]) -> bool:
    if row["target"] is None:
        return True
    above = ratio(row) >= row["target"]
    return above if row["better"] == "higher" else ratio(row) <= row["target"]


def aim(row: Mapping[str, Any]) -> str:
    return "" if row["target"] is None else f"{SIGNS[row['better']]} {row['target']:g}"


def shown(row: Mapping[str, Any]) -> str:
    """One row as a line for the terminal."""
    numbers = f"ours {number(row['ours'])}, {row['peer']} {number(row['peers'])} {row['unit']}"
    wanted = f" (wanted {aim(row)})" if aim(row) else ""
    return f"{row['case']}: {numbers}, ratio {ratio(row):.3g}{wanted}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """What was measured on."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    about: dict[str, Any] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
    }
    import torch

    if torch.cuda.is_available():
        about["device"] = torch.cuda.get_device_name(0)
    return about


def device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Of Python, what computes, and this clone."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return numbers | {"commit": commit()}


def commit() -> str:
    """The clone's commit, with a + where files differ from it; empty where git does not know."""
    argv = ["git", "-C", str(FOLDER.parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
