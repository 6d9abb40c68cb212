"""A turn of gpu_training.py as a process: started, watched, ended, and what came of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_cases import Case, written


@dataclass(frozen=True)
class Place:
    """Where and how every side trains."""

    folder: Path
    on_gpu: bool
    compiled: bool


def trained(place: Place, case: Case, side: str, limit_seconds: float) -> dict[str, Any]:
    """One training by one side, from an empty folder."""
    folder = place.folder / f"{case.name}-{side}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written(case, folder, place.on_gpu, place.compiled)
    (folder / "steps.json").write_text(json.dumps([case.warmup_steps, case.timed_steps]))
    if side == "ours":
        return ours(case, folder, limit_seconds)
    return called(side, folder, limit_seconds)


def called(side: str, folder: Path, limit_seconds: float) -> dict[str, Any]:
    """What a peer's process leaves behind."""
    script = Path(__file__).with_name("gpu_sides.py")
    outcome = folder / "outcome.json"
    with Running([sys.executable, str(script), side, str(folder)], folder / "log") as process:
        over = process.ended(limit_seconds)
    if outcome.is_file():
        figures: dict[str, Any] = json.loads(outcome.read_text())
        return figures
    return {"failed": why(folder / "log") if over else f"not done in {limit_seconds:.0f} s"}


def ours(case: Case, folder: Path, limit_seconds: float) -> dict[str, Any]:
    """Our trainer, watched through its metrics, and ended when the timed steps are done."""
    from atoll import run_dir

    until = time.monotonic() + limit_seconds
    with Running([sys.executable, "-m", "atoll", "launch", str(folder)], folder / "log") as process:
        while time.monotonic() < until:
            over = process.ended(0.2)
            records = [record for record in run_dir.metrics(folder) if record["event"] == "train"]
            if records and records[-1]["step"] >= case.steps:
                return rate_of(case, records)
            if over:
                return {"failed": why(folder / "log")}
    return {"failed": f"not done in {limit_seconds:.0f} s"}


def rate_of(case: Case, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Between the line that ends the warm-up and the line that ends the timed steps."""
    by_step = {record["step"]: record for record in records}
    begin, end = by_step[case.warmup_steps], by_step[case.steps]
    rate = (end["tokens"] - begin["tokens"]) / (end["time"] - begin["time"])
    return {"tokens_per_second": rate, "memory_gib": end["memory_gib"]}


class Running:
    """A process that is gone, with all that it started, when the block ends."""

    def __init__(self, argv: list[str], log: Path) -> None:
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                argv,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | quiet,
                start_new_session=True,
            )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, seconds: float) -> bool:
        """Wait so long; whether it ended by itself."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def why(log: Path) -> str:
    """The reason at the end of what a process printed."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    if any("OutOfMemoryError" in line for line in lines):
        return "out of memory"
    return "failed: " + " | ".join(line.strip()[:200] for line in lines[-3:])
