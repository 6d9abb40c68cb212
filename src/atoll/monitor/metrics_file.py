"""metrics.jsonl: one record a line, in the order in which they come."""

import json
import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll import run_dir


def begin(run_folder: Path, step: int) -> None:
    """Forget what was recorded after the checkpoint that a run resumes from; all, without one.

    A fault that was behind it stays, and energy that was spent until then: both did happen.
    """
    path = run_dir.metrics_file(run_folder)
    if step == 0:
        path.unlink(missing_ok=True)
    elif path.is_file():
        lines = [kept for line in path.read_text().splitlines() if (kept := _kept(line, step))]
        run_dir.write_whole(path, "".join(line + "\n" for line in lines))


def _kept(line: str, step: int) -> str:
    """A line as it is to stand in front of what comes behind a step; empty: not at all."""
    if _step_of(line) <= step:
        return line
    with suppress(ValueError):  # of one that was cut short by a kill
        record = json.loads(line)
        if record["event"] == "energy":
            return json.dumps(record | {"step": step})
    return ""


def has(run_folder: Path, event: str, step: int) -> bool:
    """Whether an event of that step is recorded."""
    path = run_dir.metrics_file(run_folder)
    lines = path.read_text().splitlines() if path.is_file() else []
    return any(f'"{event}"' in line and _step_of(line) == step for line in lines)


def append(run_folder: Path, record: dict[str, Any]) -> None:
    """Add one line."""
    record = _finite(record | {"time": round(time.time(), 3)})
    run_dir.append_record(run_dir.metrics_file(run_folder), record)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: such a number becomes null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _step_of(line: str) -> int:
    try:
        record = json.loads(line)
        return 0 if record["event"] == "fault" else int(record.get("step", 0))
    except ValueError:
        return sys.maxsize  # a line cut short by a kill
