"""How often a run was started again by itself since a person submitted it: `restarts.jsonl`."""

import time
from pathlib import Path
from typing import Any

from atoll import run_dir

SUBMITTED = "submitted"  # the event of a line that is no restart


def restarts(run_folder: Path) -> list[dict[str, Any]]:
    """A record for each restart, the oldest first: its step, time, job, and why if for a fault."""
    since: list[dict[str, Any]] = []
    for record in run_dir.records(run_dir.restarts_file(run_folder)):
        since = [] if record.get("event") == SUBMITTED else [*since, record]
    return since


def count_anew(run_folder: Path) -> None:
    """A person submitted the run again; what was written before stays, as its proof states it."""
    if restarts(run_folder):
        add_restart(run_folder, event=SUBMITTED)


def add_restart(run_folder: Path, **record: Any) -> None:
    """Write one more restart down."""
    line = {**record, "time": time.time()}
    run_dir.append_record(run_dir.restarts_file(run_folder), line, is_durable=True)
