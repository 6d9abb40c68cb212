"""Faults that meet a training on the testbed's Slurm: drawn with a seed, and made to happen."""

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.health import heartbeat

# what a training of any kind can be tried with; the others need something that looks at it
COMMON = (
    "a rank is killed",
    "a rank hangs",
    "a node's ranks are killed",
    "a node's ranks hang",
    "a node goes down",
)
KINDS = (
    *COMMON,
    "the disk is full",
    "a node is slow",
    "the loss is no number",
    "scancel",
    "the time limit's notice",
)
# that a training gets on before the next fault: enough for a checkpoint, a run without one ends
LEAST_STEPS, MOST_STEPS = 5, 12
SLOW_SECONDS = 0.05  # stopped, then going on, in turns: half of its speed
HEAD_WIDTH = 16  # of the model that is trained


@dataclass(frozen=True)
class Drawn:
    """One fault: what happens, to which rank, so many steps after the training got on again."""

    kind: str
    steps: int
    rank: int


@dataclass(frozen=True)
class RankProcess:
    """A rank of the training that runs now."""

    rank: int
    node: str
    pid: int


@dataclass(frozen=True)
class Scene:
    """What a fault can happen to."""

    ranks: Sequence[RankProcess]
    victim: RankProcess
    job: str
    runs: Path  # a file system of its own

    @property
    def on_its_node(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.node == self.victim.node]


def draw(count: int, seed: int, rank_count: int, kinds: Sequence[str]) -> list[Drawn]:
    """Kinds in equal parts, in an order, at moments and of ranks that the seed gives."""
    source = random.Random(seed)
    drawn = [kinds[number % len(kinds)] for number in range(count)]
    source.shuffle(drawn)
    return [
        Drawn(kind, source.randint(LEAST_STEPS, MOST_STEPS), source.randrange(rank_count))
        for kind in drawn
    ]


def node_of(pid: int) -> str:
    """The virtual node of a process; empty where it is gone or of no job."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return (re.findall(r"(?:^|\0)SLURMD_NODENAME=([^\0]+)", words) or [""])[0]
    return ""


def send(number: int, ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def words_of(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def turn_off(node: str) -> None:
    """As without power: its daemon and all its jobs end at once; Slurm is told of it."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    jobs = [pid for pid in pids if node_of(pid) == node]
    words = [heartbeat.process_words(pid) for pid in jobs]  # none of one that just ended
    steps = {int(of_process[1]) for of_process in words if of_process}
    steps = {pid for pid in steps if words_of(pid)[0].startswith("slurmstepd")}
    daemon = [pid for pid in pids if words_of(pid)[:3] == ["slurmd", "-N", node]]
    kill_at_once([*daemon, *steps, *jobs])
    update = ["scontrol", "update", f"nodename={node}", "state=down", "reason=fault"]
    subprocess.run(update, check=True)


def kill_at_once(pids: Sequence[int]) -> None:
    """None lives to tell of another's death, as half of an srun does: first all are frozen."""
    root = Path("/sys/fs/cgroup")
    group = next(path for path in (root / "freezer", root) if path.is_dir()) / "atoll-off"
    group.mkdir(exist_ok=True)
    for pid in pids:
        with suppress(OSError):
            (group / "cgroup.procs").write_text(str(pid))
    if (group / "cgroup.kill").exists():
        (group / "cgroup.kill").write_text("1")
    else:
        (group / "freezer.state").write_text("FROZEN")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (group / "freezer.state").write_text("THAWED")
    while (group / "cgroup.procs").read_text():
        time.sleep(0.01)
    group.rmdir()


def turn_on(node: str) -> None:
    """Start its daemon again, and let Slurm use it; some states it leaves by itself."""
    subprocess.run(["slurmd", "-N", node], check=True)
    resume = ["scontrol", "update", f"nodename={node}", "state=resume"]
    for _ in range(100):
        argv = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T", "--partition=main"]
        state = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
        if state in ("idle", "mixed", "allocated", "completing"):
            return
        subprocess.run(resume, capture_output=True)
        time.sleep(0.3)
    raise RuntimeError(f"node {node} is still {state}")


def fill_disk(runs: Path) -> None:
    """Leave no byte of the file system."""
    with open(runs / "filler", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def free_disk(runs: Path) -> None:
    (runs / "filler").unlink(missing_ok=True)


def slow_down(ranks: Sequence[RankProcess]) -> Callable[[], None]:
    """Stop and continue them in turns, until what this returns is called."""
    over = threading.Event()

    def take_turns() -> None:
        while not over.wait(SLOW_SECONDS):
            send(signal.SIGSTOP, ranks)
            over.wait(SLOW_SECONDS)
            send(signal.SIGCONT, ranks)

    thread = threading.Thread(target=take_turns, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


def spoil(rank: RankProcess) -> Callable[[], object]:
    """Make the positions of a rank's tokens no numbers, until what this returns is called."""
    frequencies = rotary_frequencies()
    no_numbers = np.full(HEAD_WIDTH // 2, np.nan, np.float32).tobytes()
    places = places_of(frequencies, rank.pid)
    if not replaced(rank, places, frequencies, no_numbers):
        raise RuntimeError(f"rank {rank.rank} (process {rank.pid}) has no rotary frequencies")
    return lambda: replaced(rank, places, no_numbers, frequencies)


def rotary_frequencies() -> bytes:
    """A buffer of the model that no step writes, so that it can be found in a rank's memory."""
    import torch

    exponents = torch.arange(0, HEAD_WIDTH, 2).float() / HEAD_WIDTH
    return (1.0 / 10_000.0**exponents).numpy().tobytes()


def places_of(content: bytes, pid: int) -> list[int]:
    """Where bytes lie in the memory that a process may write to."""
    places = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
        for line in maps:
            span, rights = line.split()[:2]
            first, last = (int(word, 16) for word in span.split("-"))
            if not rights.startswith("rw") or last - first > 1 << 30:
                continue
            with suppress(OSError, ValueError, OverflowError):
                memory.seek(first)
                text = memory.read(last - first)
                places += [first + found.start() for found in re.finditer(re.escape(content), text)]
    return places


def replaced(rank: RankProcess, places: Sequence[int], before: bytes, after: bytes) -> int:
    """Write to those places that still have these bytes; returns how many.

    The process stands meanwhile: what was a copy for a moment may be another's memory now.
    """
    count = 0
    send(signal.SIGSTOP, [rank])
    time.sleep(0.02)  # until all its threads stand
    with suppress(OSError), open(f"/proc/{rank.pid}/mem", "r+b", buffering=0) as memory:
        for place in places:
            memory.seek(place)
            if memory.read(len(before)) == before:
                memory.seek(place)
                count += memory.write(after) > 0
    send(signal.SIGCONT, [rank])
    return count


def nothing() -> None:
    pass


def happens(drawn: Drawn, scene: Scene) -> Callable[[], None]:
    """Make it happen; what this returns makes an end of it, where a person would have to."""
    return ACTIONS[drawn.kind](scene)


def _signal(number: int, node: bool = False) -> Callable[[Scene], Callable[[], None]]:
    def act(scene: Scene) -> Callable[[], None]:
        send(number, scene.on_its_node if node else [scene.victim])
        return nothing

    return act


def _down(scene: Scene) -> Callable[[], None]:
    turn_off(scene.victim.node)
    return lambda: turn_on(scene.victim.node)


def _full(scene: Scene) -> Callable[[], None]:
    fill_disk(scene.runs)
    return lambda: free_disk(scene.runs)


def _scancel(*flags: str) -> Callable[[Scene], Callable[[], None]]:
    def act(scene: Scene) -> Callable[[], None]:
        subprocess.run(["scancel", *flags, scene.job], check=True)
        return nothing

    return act


ACTIONS: Mapping[str, Callable[[Scene], Callable[[], None]]] = {
    "a rank is killed": _signal(signal.SIGKILL),
    "a rank hangs": _signal(signal.SIGSTOP),
    "a node's ranks are killed": _signal(signal.SIGKILL, node=True),
    "a node's ranks hang": _signal(signal.SIGSTOP, node=True),
    "a node goes down": _down,
    "the disk is full": _full,
    "a node is slow": lambda scene: slow_down(scene.on_its_node),
    "the loss is no number": lambda scene: spoil(scene.victim),
    "scancel": _scancel(),
    # what Slurm itself sends to the batch shell before the time limit (--signal=B:USR2@…)
    "the time limit's notice": _scancel("--batch", "--signal=USR2"),
}
