"""The journal of a round: what happened, one JSON object a line, here and at each facility.

A line is appended whole and stays. Folders say what is made (update/, global/: whole when they have
their name); where a round stands beside that is what the lines of its journal add up to.

event        at             what it says
asked        facility       what the coordinator wants of the round
inner state  facility       the checkpoint whose moments the round's run begins with; null: none
own weights  facility       with fragments, the export that the round's run goes on from; null: none
submitted    facility       a job is handed to the scheduler
refused      facility       it was not taken
accepted     facility       it was taken, and where there is no scheduler it has ended: an attempt
                            that no kill cut short
steps        coordinator    how many each facility is asked for (steps_by_queue.py)
began        coordinator    the deadline counts from here
answered     coordinator    state of a facility: needs, received, queued, running, retry, unknown,
                            unreachable, ready, refused or failed
wrong        coordinator    a facility said no, or what it sent is wrong: it is asked again
left out     coordinator    the round goes on without a facility
afresh       coordinator    the late work of a facility came to nothing: this round's is asked for
reopened     coordinator    too few updates came: who was left out is asked again;
                            waits=false: a person typed the line again
sent, received, averaged    bytes and seconds, for the report
measured     coordinator    in the last round's losses/: a facility's held-out loss of its model
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.one_writer import flock

Record = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """The journal in the folder of a round."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "journal.jsonl"

    def append(self, event: str, /, **facts: Any) -> Record:
        """Add a line that survives a power cut; one that a kill cut off before it is ended."""
        record = {"event": event, "time": round(time.time(), 3), **facts}
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            flock(file, fcntl.LOCK_EX)
            is_new = file.seek(0, os.SEEK_END) == 0
            run_dir.append_record(self.path, record, is_durable=True)
        if is_new:
            run_dir.sync_folder(self.folder)
        return record

    def records(self, *events: str) -> list[Record]:
        """Its lines in order, of all events or of these; one that was cut off is left out."""
        records = run_dir.records(self.path)
        return [record for record in records if not events or record["event"] in events]

    def since(self, event: str) -> list[Record]:
        """What came behind the last line of an event; all lines where there is none."""
        records = self.records()
        behind = [n + 1 for n, record in enumerate(records) if record["event"] == event]
        return records[behind[-1] if behind else 0 :]

    def last(self, event: str) -> Record:
        """The last line of an event; empty where there is none."""
        return next(reversed(self.records(event)), {})


def round_name(number: int) -> str:
    return f"round-{number:03d}"


def round_number(folder: Path) -> int:
    """Of a folder of that name; as a number, since round-1000 is not before round-999."""
    return int(folder.name.removeprefix("round-"))


@contextmanager
def alone(folder: Path, wait: bool = True) -> Iterator[None]:
    """One process at a time; the lock ends with the process that holds it.

    Raises `BlockingIOError` where another one holds it and nobody waits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
