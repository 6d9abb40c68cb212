"""What each rank is at, in memory that other processes of its node read: step, phase, since when.

A rank writes its own record; it is read also while the rank is stopped, stuck or dead.
"""

import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

Phase = Literal[
    "start",
    "input",
    "compute",
    "communication",
    "optimizer",
    "checkpoint",
    "evaluation",
    "export",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
_NUMBER = {name: number for number, name in enumerate(PHASES)}
ALIVE = -1  # the exit code of a rank that has not ended

FORGOTTEN_SECONDS = 60.0  # a watcher has started long before
RECORD_BYTES = 8192
_ERROR_BYTES = slice(512, RECORD_BYTES)
# Slots of eight bytes: whole numbers, then seconds of the monotonic clock, which all processes of a
# machine share.
_PID, _START_TICKS, _RANK, _STEP, _STEPS, _PHASE, _EXIT_CODE, _THREAD = range(8)
_MOVED, _STEP_BEGAN, _STEP_SECONDS, _PHASE_SECONDS = range(16, 20)


@dataclass(frozen=True)
class Record:
    """One rank's record, as another process of the node reads it."""

    rank: int
    pid: int
    start_ticks: int  # of the kernel: with it, a pid names one process for good
    step: int  # that it works at; 0: none yet
    steps: int  # that it began since it was started
    phase: Phase
    moved: float  # when it last went into a phase or a step; monotonic seconds of the node
    step_seconds: float  # that its last whole step took; 0: none yet
    seconds: dict[Phase, float]  # in each phase, the last one up to `moved`
    exit_code: int  # ALIVE until it has ended in order
    thread: int  # of its main thread, as stacks name it
    error: str  # what ended it: type and words, then its calls, the innermost last


class Heartbeat:
    """The record of this rank; of use to its main thread alone.

    `at` is called many times a step: about a microsecond.
    """

    def __init__(self, memory: "mmap.mmap | bytearray", rank: int, folder: Path) -> None:
        self._memory, self.folder = memory, folder
        self._numbers = memoryview(memory).cast("q")
        self._floats = memoryview(memory).cast("d")
        self._phase, self.has_failed = 0, False
        self._moved = self._floats[_MOVED] = time.monotonic()
        self._numbers[_RANK], self._numbers[_EXIT_CODE] = rank, ALIVE
        self._numbers[_START_TICKS] = started_ticks(os.getpid())
        self._numbers[_THREAD] = threading.main_thread().ident or 0
        self._numbers[_PID] = os.getpid()  # last: it is what makes a record one

    def at(self, phase: Phase) -> "_Stay":
        """Go over to a phase: until the next, or for the length of a `with`."""
        before = self._phase
        self._go(_NUMBER[phase])
        return _Stay(self, before)

    def waits_for_input(self) -> None:
        """From any thread: the rank has nothing to do, and that is in order."""
        if self.phase in ("start", "input"):
            self._floats[_MOVED] = time.monotonic()

    def step(self, number: int) -> None:
        """Step `number` begins."""
        now = time.monotonic()
        if self._numbers[_STEPS]:
            self._floats[_STEP_SECONDS] = now - self._floats[_STEP_BEGAN]
        self._floats[_STEP_BEGAN] = now
        self._numbers[_STEP] = number
        self._numbers[_STEPS] += 1
        self._go(self._phase)

    def ended(self, exit_code: int) -> None:
        """This rank ends in order."""
        self._go(self._phase)
        self._numbers[_EXIT_CODE] = exit_code

    def failed(self, error: str) -> None:
        """This rank ends by an error."""
        text = error.encode()[: RECORD_BYTES - _ERROR_BYTES.start - 1]
        self._go(self._phase)
        self._memory[_ERROR_BYTES.start : _ERROR_BYTES.start + len(text)] = text
        self.has_failed = True

    @property
    def phase(self) -> Phase:
        return PHASES[self._phase]

    @property
    def seconds(self) -> dict[Phase, float]:
        """What this rank spent in each phase so far, up to now."""
        self._go(self._phase)
        return dict(zip(PHASES, self._floats[_PHASE_SECONDS:], strict=False))

    def _go(self, phase: int) -> None:
        now, floats = time.monotonic(), self._floats
        floats[_PHASE_SECONDS + self._phase] += now - self._moved
        floats[_MOVED] = self._moved = now
        self._numbers[_PHASE] = self._phase = phase


class _Stay:
    """What `at` returns: a `with` of it ends in the phase before."""

    __slots__ = ("_before", "_heartbeat")

    def __init__(self, heartbeat: Heartbeat, before: int) -> None:
        self._heartbeat, self._before = heartbeat, before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._heartbeat._go(self._before)


def node_folder(run_folder: Path, start: str, node_rank: int) -> Path:
    """Where the ranks of one start of a run keep their records on this node, in its memory."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    run = sha256(os.fsencode(run_folder.resolve())).hexdigest()[:12]
    return parent / f"atoll-{os.getuid()}-{run}-{start}-{node_rank}"


def watcher_file(folder: Path) -> Path:
    return folder / "watcher"


def is_watched(folder: Path) -> bool:
    """Whether the watcher of this node is there."""
    with suppress(OSError, ValueError):
        pid, ticks = map(int, watcher_file(folder).read_text().split())
        return started_ticks(pid) == ticks
    return False


def forget_dead_starts(folder: Path) -> None:
    """Remove what starts of this user left in this memory whose watchers were killed as well.

    A watcher that is there, or may still be starting, has its own ranks' end to tell of.
    """
    for other in folder.parent.glob(f"atoll-{os.getuid()}-*"):
        records = [read(file) for file in other.glob("rank-*")]
        is_dead = [r is not None and started_ticks(r.pid) != r.start_ticks for r in records]
        if other == folder or not records or not all(is_dead) or is_watched(other):
            continue
        with suppress(OSError):  # gone already
            if time.time() - other.stat().st_mtime > FORGOTTEN_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def record_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:06d}"


def begin(folder: Path, rank: int) -> Heartbeat:
    """The record of a rank that starts, in place of one that an earlier process left."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = record_file(folder, rank)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, RECORD_BYTES)
        return Heartbeat(mmap.mmap(descriptor, RECORD_BYTES), rank, folder)
    finally:
        os.close(descriptor)


def unwatched(rank: int) -> Heartbeat:
    """A record that no other process reads."""
    return Heartbeat(bytearray(RECORD_BYTES), rank, Path(os.devnull))


def read(file: Path) -> Record | None:
    """The record in a file; None where its rank has not begun it."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if len(content) < RECORD_BYTES:
        return None
    numbers = struct.unpack_from("8q", content)
    moved, _, step_seconds, *seconds = struct.unpack_from(f"{3 + len(PHASES)}d", content, 8 * 16)
    if not numbers[_PID]:
        return None
    return Record(
        rank=numbers[_RANK],
        pid=numbers[_PID],
        start_ticks=numbers[_START_TICKS],
        step=numbers[_STEP],
        steps=numbers[_STEPS],
        phase=PHASES[numbers[_PHASE]],
        moved=moved,
        step_seconds=step_seconds,
        seconds=dict(zip(PHASES, seconds, strict=True)),
        exit_code=numbers[_EXIT_CODE],
        thread=numbers[_THREAD],
        error=content[_ERROR_BYTES].rstrip(b"\0").decode(errors="replace"),
    )


def read_all(folder: Path, ranks: Iterable[int]) -> dict[int, Record]:
    """Rank -> record, of those that have one."""
    records = {rank: read(record_file(folder, rank)) for rank in ranks}
    return {rank: record for rank, record in records.items() if record is not None}


def started_ticks(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 where there is none."""
    words = process_words(pid)
    return int(words[19]) if words else 0


def process_words(pid: int) -> list[str]:
    """What /proc says of a process behind its name, its state first; empty where there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
