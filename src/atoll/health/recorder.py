"""What torch's flight recorder knows of this rank's collectives, for whoever watches it.

torch 2.13 records those of gloo too; where nothing is recorded, nothing is known.
"""

import json
import threading
from typing import Any

from torch._C import _distributed_c10d as c10d

# of NCCL, which has a recorder of its own; of everything else
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
MOST_PENDING = 8


def collectives() -> dict[str, Any]:
    """`pending`: those that the loop waits for, oldest first; `entered`: group -> last number."""
    entries = [entry for name in _DUMPS for entry in _entries(name)]
    beside = background_threads()
    own = [entry for entry in entries if entry.get("thread_id") not in beside]
    return condensed(own)


def condensed(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Of recorded collectives: which are pending, and the last of each group."""
    pending = [entry for entry in entries if not is_over(entry)]
    oldest = sorted(pending, key=lambda entry: int(entry.get("record_id", 0)))
    entered: dict[str, int] = {}
    for entry in entries:
        group, number = group_of(entry), int(entry["collective_seq_id"])
        entered[group] = max(number, entered.get(group, 0))
    named = [
        {
            "name": entry["profiling_name"],
            "number": int(entry["collective_seq_id"]),
            "group": group_of(entry),
            "state": str(entry.get("state", "")),
        }
        for entry in oldest[:MOST_PENDING]
    ]
    return {"pending": named, "entered": entered}


def is_over(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def group_of(entry: dict[str, Any]) -> str:
    return str(entry["process_group"][0])


def background_threads() -> set[str]:
    """Python's threads beside the main one, as a checkpoint's, which waits by itself.

    What autograd's threads do is the step's; they are not started by Python.
    """
    return {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    }


def _entries(name: str) -> list[dict[str, Any]]:
    dump = getattr(c10d, name, None)
    trace = json.loads(dump(True, False)) if dump is not None else {}
    entries: list[dict[str, Any]] = trace.get("entries", [])
    return entries
