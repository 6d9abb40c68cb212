"""The faults of a run, `faults.jsonl`: what went wrong, where, and what says so.

The ranks write it, or the job's shell where the first rank is the one at fault; status, report and
the next start of the run read it.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from atoll import run_dir

Kind = Literal["died", "stalled", "slow", "unfit", "non_finite", "spike", "corrupted"]
ENDING: tuple[Kind, ...] = ("died", "stalled", "unfit")  # no step of the run follows by itself
# Whom the evidence speaks against. Only a node may be excluded; a Python exception, or a loss that
# is no number, never speaks against one.
Blame = Literal["node", "code", "data", "unknown"]


@dataclass(frozen=True)
class Fault:
    """One fault, as far as it is known; what is not is None or empty."""

    kind: Kind
    blame: Blame
    evidence: str  # one sentence for a person
    node: str = ""
    rank: int | None = None
    device: str = ""
    step: int | None = None
    phase: str = ""  # what the rank was at
    collective: str = ""  # the last that it entered, or that the others wait in
    stack: list[str] = field(default_factory=list)  # innermost call last
    job: str = ""
    time: float = 0.0  # seconds since 1970


def faults(run_folder: Path) -> list[Fault]:
    """The faults of a run, the oldest first."""
    return [Fault(**record) for record in run_dir.records(run_dir.faults_file(run_folder))]


def faults_since(run_folder: Path, known_lines: int) -> list[Fault]:
    """Those behind so many lines of the file, as `grep -c` counts them: cut short or whole."""
    file = run_dir.faults_file(run_folder)
    lines = file.read_bytes().splitlines()[known_lines:] if file.is_file() else []
    return [Fault(**record) for record in run_dir.whole_records(lines)]


def add_fault(run_folder: Path, fault: Fault) -> None:
    """Write one more fault down, one without a time as of now; several nodes may do so at once."""
    record = asdict(fault) | {"time": fault.time or round(time.time(), 3)}
    run_dir.append_record(run_dir.faults_file(run_folder), record, is_durable=True)


def in_a_line(fault: Fault) -> str:
    """A fault as a person reads it on a terminal, in status and in the report."""
    rank = None if fault.rank is None else f"rank {fault.rank}"
    place = [rank, fault.node and f"on {fault.node}", fault.device and f"({fault.device})"]
    moment = [None if fault.step is None else f"step {fault.step}", fault.phase, fault.collective]
    where, when = (" ".join(filter(None, place)), ", ".join(filter(None, moment)))
    return ": ".join(filter(None, [where, when, fault.evidence]))
