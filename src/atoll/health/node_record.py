"""What one node writes down of its ranks when something went wrong, and where.

`RUN/health/START/node-NNNNN.json`: at first which ranks the node has, behind a fault what each of
them was at. Read by the judge, and by a person.
"""

import json
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.health.heartbeat import ALIVE, Record, process_words

GONE = "gone"
STOPPED = ("T", "t")
MOST_FRAMES = 40
# What a rank says whose peers are gone, in gloo's words and in NCCL's.
PEER_ERROR = re.compile(
    r"gloo/|DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|ncclSystemError|"
    r"remote process exited|Connection (reset|closed|refused)|Broken pipe|"
    r"Timed out (waiting|after)|timed out|TCPStore|failed to (recv|send)|Socket (closed|Timeout)",
    re.IGNORECASE,
)
_JOB = re.compile(r"job_\d+")
_FATAL = {
    "Segmentation fault": int(signal.SIGSEGV),
    "Aborted": int(signal.SIGABRT),
    "Bus error": int(signal.SIGBUS),
    "Floating-point exception": int(signal.SIGFPE),
    "Illegal instruction": int(signal.SIGILL),
}
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\S+) in (?P<function>.*)')


@dataclass(frozen=True)
class RankState:
    """One rank, as its watcher saw it."""

    rank: int
    device: str
    pid: int = 0  # 0: it never began
    process: str = GONE  # its state, the letter of /proc; or gone
    killed_by: int = 0  # the signal, where that is known
    step: int = 0
    phase: str = "start"
    moved: float = 0.0  # when, in seconds since 1970; behind an error: when that was
    exit_code: int = ALIVE
    error: str = ""
    stack: list[str] = field(default_factory=list)  # innermost call last
    answered: bool = False  # did its recorder answer; the next two are empty where it did not
    pending: list[dict[str, Any]] = field(default_factory=list)  # collectives it waits for
    entered: dict[str, int] = field(default_factory=dict)  # group -> number of its last one

    @property
    def is_stopped(self) -> bool:
        return self.process in STOPPED

    @property
    def is_gone(self) -> bool:
        """Its process ended, and it left no word of why."""
        return (
            self.process == GONE and bool(self.pid) and self.exit_code == ALIVE and not self.error
        )

    @property
    def is_at_work(self) -> bool:
        return self.exit_code == ALIVE and not self.error and not self.is_gone


@dataclass(frozen=True)
class NodeRecord:
    """A node and its ranks; `reason` is empty as long as nothing went wrong."""

    node_rank: int
    node: str
    reason: str = ""  # of its dump: died, failed, stalled, called (by another node)
    time: float = 0.0
    ranks: list[RankState] = field(default_factory=list)
    memory_kills: int = 0  # processes of the job that the kernel killed for their memory


def write(folder: Path, record: NodeRecord) -> None:
    """Whole or not at all; no wait for the disk, which may be what is stuck."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"node-{record.node_rank:05d}.json"
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(asdict(record), indent=1))
    os.replace(partial, file)


def forget(folder: Path, node_rank: int) -> None:
    """Nothing went wrong: no file of this node's stays, and with the last one the folder goes."""
    (folder / f"node-{node_rank:05d}.json").unlink(missing_ok=True)
    for empty in (folder, folder.parent):
        with suppress(OSError):
            empty.rmdir()


def read_nodes(folder: Path) -> list[NodeRecord]:
    """The records of all nodes that wrote one, in order; one that a crash left empty is none."""
    contents = []
    for file in sorted(folder.glob("node-*.json")):
        with suppress(ValueError, OSError):
            contents.append(json.loads(file.read_text()))
    return [
        NodeRecord(**{**content, "ranks": [RankState(**state) for state in content["ranks"]]})
        for content in contents
    ]


def start_of(lease_folder: Path, faults_file: Path, port: int) -> str:
    """A name for this start of the run, the same on all its ranks: lease, faults so far, port.

    A job may start its ranks again after a fault, with the same lease and port.
    """
    lease = max(lease_numbers(lease_folder), default=0)
    count = faults_file.read_bytes().count(b"\n") if faults_file.is_file() else 0
    return f"{lease}-{count}-{port}"


def newest_start(records: Path) -> Path | None:
    """The folder of a run's last start that left records."""
    starts = [folder for folder in records.glob("*-*-*") if folder.is_dir()]
    return max(
        starts, key=lambda folder: [int(word) for word in folder.name.split("-")], default=None
    )


def lease_numbers(lease_folder: Path) -> list[int]:
    names = os.listdir(lease_folder) if lease_folder.is_dir() else []
    return [int(name) for name in names if name.isdecimal()]


def process_state(record: Record) -> tuple[str, int]:
    """The letter of a rank's process and the signal that killed it, if both are known."""
    words = process_words(record.pid)
    if not words or int(words[19]) != record.start_ticks:
        return GONE, 0
    if words[0] in "ZX":
        return GONE, int(words[49]) & 0x7F
    return words[0], 0


def memory_kills(cgroup: str, root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of this job the kernel killed here because its memory was full.

    cgroup: what /proc/self/cgroup says; a job's own group counts those of all its tasks. 0 where
    nothing is known.
    """
    path = next((line[3:] for line in cgroup.splitlines() if line.startswith("0::")), "")
    own = root / path.lstrip("/")
    of_job = next((group for group in own.parents if _JOB.fullmatch(group.name)), own)
    with suppress(OSError):
        words = (of_job / "memory.events").read_text().split()
        counts = dict(zip(words[::2], words[1::2], strict=False))
        return int(counts.get("oom_kill", 0))
    return 0


def main_stack(text: str, thread: int) -> list[str]:
    """The calls of one thread in dumps by faulthandler, the innermost last.

    An answer is of the main thread alone and does not name it; a crash dumps all of them.
    """
    blocks = re.split(r"^(?=Thread|Current thread|Stack)", text, flags=re.MULTILINE)
    own = [block for block in blocks if f"0x{thread:016x}" in block.partition("\n")[0]]
    lines = (own or blocks)[-1].splitlines()
    frames = [match for match in map(_FRAME.match, lines) if match]
    named = [f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in frames]
    return named[:MOST_FRAMES][::-1]


def rank_state(
    record: Record,
    process: tuple[str, int],
    device: str,
    stack: str,
    answer: Mapping[str, Any] | None,
    offset: float,
) -> RankState:
    """A rank's record, process, stacks and collectives together.

    `offset`: seconds from its monotonic clock to those since 1970.
    """
    words, _, calls = record.error.partition("\n")
    return RankState(
        rank=record.rank,
        device=device,
        pid=record.pid,
        process=process[0],
        killed_by=process[1] or fatal_signal(stack),
        step=record.step,
        phase=record.phase,
        moved=record.moved + offset,
        exit_code=record.exit_code,
        error=words,
        stack=calls.splitlines() if words else main_stack(stack, record.thread),
        answered=answer is not None,
        **(answer or {}),
    )


def fatal_signal(stack: str) -> int:
    """The signal behind which faulthandler wrote a process's last stacks; 0: none."""
    match = re.search(r"^Fatal Python error: (.*)$", stack, re.MULTILINE)
    return _FATAL.get(match[1], 0) if match else 0


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
