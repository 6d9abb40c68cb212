"""How often a run was started again by itself since a person submitted it: `restarts.jsonl`."""

import json
import time
from pathlib import Path
from typing import Any

from atoll import run_dir


def restarts(run_folder: Path) -> list[dict[str, Any]]:
    """A record for each restart, the oldest first: its step, time, job, and why if for a fault."""
    file = run_dir.restarts_file(run_folder)
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def add_restart(run_folder: Path, **record: Any) -> None:
    """Write one more restart down."""
    records = [*restarts(run_folder), {**record, "time": time.time()}]
    text = "".join(json.dumps(each) + "\n" for each in records)
    run_dir.write_whole(run_dir.restarts_file(run_folder), text)
