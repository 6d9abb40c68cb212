"""`atoll status RUN --follow`: progress as the run writes it down, wherever its folder is seen."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll import run_dir

POLL_SECONDS = 2.0
LIVE = ("queued", "running", "unknown")


def follow(folder: Path, status: Callable[[Path], tuple[str, str]]) -> int:
    """Print each new line until the run has ended, by its status; 0 if it is finished."""
    shown, before = 0, ""
    while True:
        state, why = status(folder)
        lines = run_dir.metrics(folder)
        shown = min(shown, len(lines))  # a run that resumes forgets what came after its checkpoint
        steps = next((line["steps"] for line in lines if "steps" in line), 0)
        for line in lines[shown:]:
            if text := progress(line, steps):
                print(text, flush=True)
        shown = len(lines)
        if state != before:
            print(f"{folder.name}: {state}, {why}", flush=True)
        if state not in LIVE:
            return int(state != "finished")
        before = state
        time.sleep(POLL_SECONDS)


def progress(line: dict[str, Any], steps: int) -> str:
    """What one line of metrics says to a person; empty for those that say nothing to one."""
    if line["event"] == "train":
        minutes, seconds = divmod(round((steps - line["step"]) * line["step_seconds"]), 60)
        rate = f"{line['tokens_per_second']:,.0f} tokens/s"
        place = f"step {line['step']:>6}/{steps}"
        return f"{place}  loss {line['loss']:.4f}  {rate}  {minutes}:{seconds:02d} left"
    if line["event"] == "evaluation":
        figures = {name: x for name, x in line.items() if isinstance(x, float) and name != "time"}
        said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        return f"step {line['step']:>6}  held-out {said}"
    if line["event"] == "checkpoint":
        return f"step {line['step']:>6}  saved in {line['save_seconds']:.1f} s"
    return ""
