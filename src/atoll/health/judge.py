"""Judge a fault once, from the records of all nodes, and tell of it: one line, one record each.

The watcher of the first node that speaks does so, or `atoll judge RUN` at the end of a job that was
ended before one could.
"""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.health.culprit import culprit
from atoll.health.faults import Fault, add_fault, in_a_line
from atoll.health.node_record import lease_numbers, read_nodes
from atoll.health.watchdog import claim_file, verdict_file, wait_until

ABOUT = "Name who is at fault for the end of a run's last job, if nobody did yet."


def main(argv: list[str]) -> int:
    """Behind the ranks of a job: judge what its nodes wrote down, if its first node did not."""
    parser = CommandParser("judge", ABOUT)
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the folder of a run")
    run_folder = parser.read(argv).run_folder
    number = max(lease_numbers(run_dir.lease_folder(run_folder)), default=0)
    for records in sorted(run_dir.node_records(run_folder).glob(f"{number}-*")):
        if not verdict_file(records).exists():
            judge(run_folder, records, 0, missing_speaks=False)
    return 0


def judge_together(run_folder: Path, records: Path, node_count: int, seconds: float) -> None:
    """Judge once all nodes wrote down their part, or had so many seconds to."""
    wait_until(lambda: sum(bool(n.reason) for n in read_nodes(records)) == node_count, seconds)
    judge(run_folder, records, node_count, missing_speaks=True)


def is_first_to_speak(records: Path, node_rank: int) -> bool:
    """Whether a node is to judge: no other did, and none before it wrote anything down."""
    speaking = [node.node_rank for node in read_nodes(records) if node.reason]
    return not verdict_file(records).exists() and min(speaking, default=-1) == node_rank


def judge(run_folder: Path, records: Path, node_count: int, missing_speaks: bool) -> None:
    """Name the culprit of a start, tell of it, and leave the verdict for the other nodes."""
    fault = culprit(read_nodes(records), node_count, missing_speaks)
    try:
        claim_file(records).touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:  # a full disk: told twice rather than not at all
        pass
    if fault is not None:
        fault = replace(fault, job=job_of(run_folder), time=round(fault.time, 3))
        tell(run_folder, fault)
    with suppress(OSError):
        text = json.dumps(None if fault is None else asdict(fault), indent=1)
        run_dir.write_whole(verdict_file(records), text)


def tell(run_folder: Path, fault: Fault) -> None:
    """On the terminal, in faults.jsonl and in metrics.jsonl."""
    sys.stderr.write(f"atoll: {in_a_line(fault)}\n")
    sys.stderr.flush()
    record = {"event": "fault", **asdict(fault), "time": round(time.time(), 3)}
    with suppress(OSError):  # a full disk, which may be what went wrong
        add_fault(run_folder, fault)
        run_dir.append_record(run_dir.metrics_file(run_folder), record)


def job_of(run_folder: Path) -> str:
    """The job that holds the run, as its lease says; empty: it cannot be read now."""
    folder = run_dir.lease_folder(run_folder)
    words: list[str] = []
    with suppress(OSError):  # a fault counts without it
        words = (folder / str(max(lease_numbers(folder), default=0))).read_text().split()
    return words[1] if len(words) > 1 else ""
