"""One watcher per node: sees ranks die, fail and stall, writes down what they were at, ends them.

It is a process of its own, without torch, so that it works whatever its ranks are stuck in. That of
the first node also judges, or of the next one where that says nothing; the others wait for the
verdict before they end their ranks, so that no launcher ends a watcher that is not done.
"""

import json
import os
import select
import shutil
import signal
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.health import node_record
from atoll.health.heartbeat import (
    ALIVE,
    Record,
    forget_dead_starts,
    read,
    read_all,
    record_file,
    started_ticks,
    watcher_file,
)
from atoll.health.node_record import GONE, PEER_ERROR, STOPPED, NodeRecord, RankState

ANSWER_SIGNAL = signal.SIGUSR1
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

STALL_STEPS = 20  # without watch.stall_seconds: so many of the run's own median step, but
LEAST_STALL_SECONDS = 180.0  # no less than this
WARM_UP_STEPS = 2  # compile, connect and allocate
SLOW_PHASES = ("start", "checkpoint", "evaluation", "export")

TICK_SECONDS = 0.5
QUIET_SECONDS = (
    1.0  # so long nobody moved, before the run's folder is asked for other nodes' faults
)
ASK_SECONDS = 2.0  # between two such questions
SUSPENDED_SECONDS = 5.0  # the watcher itself was away for so long: the job was suspended
ANSWER_SECONDS = 1.5  # a rank that is stopped, or stuck in C, never answers
COLLECT_SECONDS = 6.0  # the first node waits so long for the records of the others
VERDICT_SECONDS = COLLECT_SECONDS + 3.0  # and they for its verdict; then another one judges
PATIENCE_SECONDS = VERDICT_SECONDS + 5.0  # a rank that failed waits so long with its end
GRACE_SECONDS = 5.0  # for ranks that failed to print their own error

OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Watched:
    """What a watcher has to know of its node and of the run."""

    run_folder: str
    records: str  # folder of what nodes write down
    folder: str  # of the ranks' records in this node's memory
    node_rank: int
    node_count: int
    first_rank: int
    ranks: int
    device: str
    stall_seconds: float | None
    slow_seconds: float

    def in_words(self) -> str:
        return json.dumps(asdict(self))

    @property
    def numbers(self) -> range:
        return range(self.first_rank, self.first_rank + self.ranks)


def question_file(folder: Path, rank: int) -> Path:
    return folder / f"question-{rank:06d}"


def answer_file(folder: Path, rank: int) -> Path:
    return folder / f"collectives-{rank:06d}.json"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank:06d}"


def judged_file(folder: Path) -> Path:
    return folder / "judged"


def call_file(records: Path) -> Path:
    """There once a node saw a fault: the others write down theirs."""
    return records / "fault"


def claim_file(records: Path) -> Path:
    """Whoever makes it tells of the fault, and nobody else."""
    return records / "judge"


def verdict_file(records: Path) -> Path:
    return records / "verdict.json"


def main(argv: list[str]) -> int:
    """Watch until the ranks have ended, or something went wrong and was dealt with."""
    watched = Watched(**json.loads(argv[0]))
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    folder, records = Path(watched.folder), Path(watched.records)
    if not folder.is_dir():
        return 0
    watcher_file(folder).write_text(f"{os.getpid()} {started_ticks(os.getpid())}")
    forget_dead_starts(folder)
    begin(watched, records)
    memory_kills = node_record.memory_kills(text_of(OWN_CGROUP))
    if reason := Watcher(watched).wait():
        deal_with(watched, reason, memory_kills)
    elif not call_file(records).exists():
        node_record.forget(records, watched.node_rank)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def begin(watched: Watched, records: Path) -> None:
    """Say which ranks this node has, for whoever finds that it says nothing more."""
    ranks = [RankState(rank, device(watched, rank)) for rank in watched.numbers]
    with suppress(OSError):  # a full disk
        forget_verdict(watched, records)
        node_record.write(records, NodeRecord(watched.node_rank, node_name(), ranks=ranks))


def forget_verdict(watched: Watched, records: Path) -> None:
    """Of an earlier start with the same name."""
    if watched.node_rank == 0:
        for file in (call_file(records), claim_file(records), verdict_file(records)):
            file.unlink(missing_ok=True)


class Watcher:
    """Looks at the ranks of a node until one died or failed, all stalled, or all ended."""

    def __init__(self, watched: Watched) -> None:
        self.watched, self.folder = watched, Path(watched.folder)
        self.step_seconds: deque[float] = deque(maxlen=64)
        self.steps: dict[int, int] = {}
        self.began = self.looked = self.asked = self.away_until = time.monotonic()
        self.told_to_end = False
        self.ends = select.poll()  # wakes at the end of a process
        self.known: set[int] = set()
        signal.signal(signal.SIGTERM, self._note_end)

    def _note_end(self, *_: object) -> None:
        self.told_to_end = True

    def wait(self) -> str:
        """What happened: died, failed, stalled, called; empty where all ranks ended in order."""
        tick = min(TICK_SECONDS, (self.watched.stall_seconds or TICK_SECONDS * 4) / 4)
        while True:
            for descriptor, _ in self.ends.poll(tick * 1000):
                self.ends.unregister(descriptor)
                os.close(descriptor)
            now = time.monotonic()
            if now - self.looked > SUSPENDED_SECONDS:
                self.away_until = now
            self.looked = now
            states = {
                rank: node_record.process_state(record)[0]
                for rank, record in read_all(self.folder, self.watched.numbers).items()
            }
            # behind the states: a rank says that it ended before it does
            records = {
                rank: record
                for rank, record in read_all(self.folder, self.watched.numbers).items()
                if rank in states
            }
            self._learn(records)
            reason = self._reason(records, states, now)
            if not records and not self.folder.is_dir():
                return ""  # nothing will ever be seen there
            if reason or (records and not at_work(records, states)):
                return reason

    def _reason(self, records: dict[int, Record], states: dict[int, str], now: float) -> str:
        running = [r for r in records.values() if r.exit_code == ALIVE]
        if any(record.error for record in running):
            return "failed"
        if any(states[record.rank] == GONE for record in running):
            return "" if self.told_to_end else "died"
        if not running:
            return ""
        is_stopped = any(states[record.rank] in STOPPED for record in running)
        moved = {record.rank: max(record.moved, self.away_until) for record in running}
        if all(now - moved[r.rank] > self.allowed_seconds(r, is_stopped) for r in running):
            return "stalled"
        return "called" if now - max(moved.values()) > QUIET_SECONDS and self._is_called() else ""

    def allowed_seconds(self, record: Record, is_stopped: bool) -> float:
        """For how long a rank may stay where it is; longer where that may well be slow."""
        median = statistics.median(self.step_seconds) if self.step_seconds else 0.0
        longest = self.watched.stall_seconds or max(LEAST_STALL_SECONDS, STALL_STEPS * median)
        is_slow = record.phase in SLOW_PHASES or record.steps <= WARM_UP_STEPS
        return max(longest, self.watched.slow_seconds) if is_slow and not is_stopped else longest

    def _learn(self, records: dict[int, Record]) -> None:
        for rank, record in records.items():
            if record.steps > self.steps.get(rank, 0) and record.step_seconds:
                self.step_seconds.append(record.step_seconds)
            self.steps[rank] = record.steps
            if rank not in self.known:
                self.known.add(rank)
                with suppress(OSError, AttributeError):  # an old kernel: each tick tells as well
                    self.ends.register(os.pidfd_open(record.pid), select.POLLIN)

    def _is_called(self) -> bool:
        now = time.monotonic()
        if self.watched.node_count == 1 or now - self.asked < ASK_SECONDS:
            return False
        self.asked = now
        with suppress(OSError):  # a file system that does not answer now is asked again
            return call_file(Path(self.watched.records)).exists()
        return False


def at_work(records: dict[int, Record], states: dict[int, str]) -> list[Record]:
    return [r for r in records.values() if r.exit_code == ALIVE and states[r.rank] != GONE]


def deal_with(watched: Watched, reason: str, memory_kills: int) -> None:
    """Write down what the ranks are at, have it judged, and end them.

    memory_kills: those that were counted before the run.
    """
    folder, records = Path(watched.folder), Path(watched.records)
    seen = read_all(folder, watched.numbers)
    # at once, as far as that goes without the ranks: a launcher may be about to end this process
    dump(watched, reason, memory_kills)
    with suppress(OSError):
        call_file(records).touch()
    ask(folder, seen)
    if dump(watched, reason, memory_kills):  # else nobody could tell another anything
        judge(watched, records)
    end_ranks(folder, read_all(folder, watched.numbers))


def judge(watched: Watched, records: Path) -> None:
    """Until there is a verdict, of this node or of another."""
    from atoll.health import judge  # pydantic, for which a watcher has no use until now

    if watched.node_rank > 0:
        wait_until(verdict_file(records).exists, VERDICT_SECONDS)
        if judge.is_first_to_speak(records, watched.node_rank):
            judge.judge(Path(watched.run_folder), records, watched.node_count, missing_speaks=True)
        else:
            wait_until(verdict_file(records).exists, PATIENCE_SECONDS - VERDICT_SECONDS)
        return
    judge.judge_together(Path(watched.run_folder), records, watched.node_count, COLLECT_SECONDS)


def dump(watched: Watched, reason: str, kills_before: int) -> bool:
    """Write down what the ranks are at; False where that cannot be, as on a full disk."""
    states = [state_of(watched, rank) for rank in watched.numbers]
    kills = node_record.memory_kills(text_of(OWN_CGROUP)) - kills_before
    node = NodeRecord(watched.node_rank, node_name(), reason, time.time(), states, kills)
    try:
        node_record.write(Path(watched.records), node)
    except OSError:
        return False
    return True


def state_of(watched: Watched, rank: int) -> RankState:
    """All that is known of a rank now."""
    folder = Path(watched.folder)
    record = read(record_file(folder, rank))
    if record is None:
        return RankState(rank, device(watched, rank))
    process = node_record.process_state(record)
    record = read(record_file(folder, rank)) or record  # it may have ended in order since
    stack = text_of(stack_file(folder, rank))
    offset = time.time() - time.monotonic()
    where = device(watched, rank)
    return node_record.rank_state(record, process, where, stack, answer(folder, rank), offset)


def ask(folder: Path, seen: dict[int, Record]) -> None:
    """Ask ranks that can answer for stack and collectives, and wait a moment for both."""
    asked = []
    for rank, record in seen.items():
        state = node_record.process_state(record)[0]
        if record.exit_code != ALIVE or state == GONE or state in STOPPED:
            continue
        asked.append(rank)
        with suppress(OSError):
            os.kill(record.pid, ANSWER_SIGNAL)
            os.close(os.open(question_file(folder, rank), os.O_WRONLY | os.O_NONBLOCK))
    wait_until(
        lambda: all(
            answer_file(folder, rank).exists() and text_of(stack_file(folder, rank))
            for rank in asked
        ),
        ANSWER_SECONDS,
    )


def answer(folder: Path, rank: int) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(answer_file(folder, rank).read_text())
        return content
    return None


def end_ranks(folder: Path, seen: dict[int, Record]) -> None:
    """SIGKILL, which a stopped process hears too; who failed by itself prints its error first.

    The others are stopped meanwhile: all that they could say is that a peer is gone.
    """
    failed = [r for r in seen.values() if r.error and not PEER_ERROR.search(r.error)]
    others = [record for record in seen.values() if record not in failed]
    for record in others:
        send(record, signal.SIGSTOP if failed else signal.SIGKILL)
    judged_file(folder).touch()
    wait_until(lambda: not any(map(is_there, failed)), GRACE_SECONDS if failed else 0.0)
    for record in [*failed, *others]:
        send(record, signal.SIGKILL)


def send(record: Record, number: int) -> None:
    """A signal to a rank, and to all that it started where it leads a group of its own."""
    if not is_there(record):
        return
    with suppress(ProcessLookupError, PermissionError):
        leads = os.getpgid(record.pid) == record.pid
        (os.killpg if leads else os.kill)(record.pid, number)


def is_there(record: Record) -> bool:
    return node_record.process_state(record)[0] != GONE


def wait_until(is_so: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)


def text_of(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def device(watched: Watched, rank: int) -> str:
    return "cpu" if watched.device == "cpu" else f"{watched.device}:{rank - watched.first_rank}"


def node_name() -> str:
    """As the scheduler calls it, which is how it is excluded."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
