"""One fault meets a training: what became of it, and whether the right one was named for it."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drawn_faults
from drawn_faults import Drawn, RankProcess, Scene
from fault_sides import NODES, RANKS_PER_NODE, Side

from atoll.cluster import goodput
from atoll.health.exclusions import excluded, take_back
from atoll.health.faults import ENDING, Fault, faults

PATIENCE_SECONDS, SLOW_PATIENCE_SECONDS = 240, 40
LIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "STAGE_OUT", "SUSPENDED"}
# kind -> what the run has to write down: the fault's kind and blame; None: no fault
WRITTEN = {
    "a rank is killed": ("died", "node"),
    "a rank hangs": ("stalled", "node"),
    "a node's ranks are killed": ("died", "node"),
    "a node's ranks hang": ("stalled", "node"),
    "a node goes down": ("died", "node"),
    "the disk is full": None,
    "a node is slow": ("slow", None),
    "the loss is no number": ("non_finite", "data"),
    "scancel": None,
    "the time limit's notice": None,
}
BY_A_PERSON = {"the disk is full", "scancel"}  # after which the line has to be typed again
GOES_ON = {"a node is slow", "the loss is no number"}  # without a new start


def wait(ready: Callable[[], Any], seconds: float, pause_seconds: float = 0.05) -> bool:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            return False
        time.sleep(pause_seconds)
    return True


def wait_for_slurm(ready: Callable[[], Any]) -> bool:
    """The answer costs some of the two cores that Slurm and the training share."""
    return wait(ready, PATIENCE_SECONDS, pause_seconds=0.25)


def is_live(side: Side, folder: Path) -> bool:
    argv = ["squeue", "--noheader", f"--jobs={side.job(folder)}", "--format=%T"]
    done = subprocess.run(argv, capture_output=True, text=True)
    return bool(LIVE & set(done.stdout.split()))


def come_to(side: Side, folder: Path, step: int) -> bool:
    """Wait until the training is past a step; False where it is finished before.

    Where it has ended before, a person types its line again.
    """
    asked = time.monotonic()
    until = asked + PATIENCE_SECONDS
    while not (side.step(folder) > step and len(side.ranks(folder)) == NODES * RANKS_PER_NODE):
        if side.is_finished(folder):
            return False
        if time.monotonic() > until:
            if side.name == "ours":
                raise RuntimeError(f"no step after {step} in {PATIENCE_SECONDS} s")
            subprocess.run(["scancel", side.job(folder)], check=False)  # as its user would
            until = time.monotonic() + PATIENCE_SECONDS
        if time.monotonic() - asked > 1:
            asked = time.monotonic()
            if not is_live(side, folder) and not side.is_finished(folder):
                type_again(side, folder)
        time.sleep(0.05)
    return True


def type_again(side: Side, folder: Path) -> None:
    side.typed.append(folder)
    side.submit(folder)


@dataclass(frozen=True)
class Met:
    """What became of one fault."""

    kind: str
    step: int
    seconds: float  # until the training was past the same step again
    right: bool  # as it should be: who is named, who is left out, who had to type
    what: str
    node: str
    # of ours, until it was told, and until the ranks had model and state again; None: neither
    told_seconds: float | None = None
    loaded_seconds: float | None = None


def victim_of(drawn: Drawn, ranks: Sequence[RankProcess], slow_node: str) -> RankProcess:
    """The rank that was drawn; where a node is slow already, it is that one which fails next.

    Both would be left out, and four nodes are too few for that.
    """
    blame = (WRITTEN[drawn.kind] or ("", ""))[1]
    among = [r for r in ranks if r.node == slow_node] if blame == "node" and slow_node else ranks
    return sorted(among, key=lambda rank: rank.rank)[drawn.rank % len(among)]


def meet(side: Side, folder: Path, drawn: Drawn, runs: Path, slow_node: str = "") -> Met:
    """Make one fault happen, and wait until the training is where it was."""
    ranks = side.ranks(folder)
    victim = victim_of(drawn, ranks, slow_node)
    step, known, typed = side.step(folder), len(faults(folder)), len(side.typed)
    began = time.time()
    what = until_it_goes_on(side, folder, drawn, Scene(ranks, victim, side.job(folder), runs))
    come_to(side, folder, step)
    seconds = time.time() - began
    if side.name != "ours":
        return Met(drawn.kind, step, seconds, True, "", victim.node)
    left_out = set(excluded(folder))
    new = faults(folder)[known:]
    what = what or judged(drawn, victim, new, left_out - {slow_node})
    if len(side.typed) > typed and drawn.kind not in BY_A_PERSON:
        what = what or "the line had to be typed again"
    if left_out:
        take_back(folder, sorted(left_out))
    told = next((fault.time - began for fault in new), None)
    loaded = max((at - began for at in loads(folder)), default=0.0)
    times = (told, loaded if loaded > 0 else None)
    return Met(drawn.kind, step, seconds, not what, what, victim.node, *times)


def until_it_goes_on(side: Side, folder: Path, drawn: Drawn, scene: Scene) -> str:
    """Make the fault happen, and what a person does about it; what is wrong, empty: nothing."""
    known, starts = len(faults(folder)), side.starts(folder)
    end = drawn_faults.happens(drawn, scene)
    what = ""
    if drawn.kind in GOES_ON:
        patience = SLOW_PATIENCE_SECONDS
        wait(lambda: len(faults(folder)) > known or side.is_finished(folder), patience)
    elif drawn.kind in BY_A_PERSON:
        wait_for_slurm(lambda: not is_live(side, folder))
        what = not_told(folder) if drawn.kind == "the disk is full" else ""
    else:
        wait_for_slurm(lambda: side.starts(folder) > starts or not is_live(side, folder))
    end()
    if drawn.kind in BY_A_PERSON and not side.is_finished(folder):
        type_again(side, folder)
    return what


def loads(folder: Path) -> list[float]:
    """When ranks of our run had their model and its state."""
    return [line["time"] for line in goodput.ledger(folder) if line["event"] == "start"]


def not_told(folder: Path) -> str:
    """What is wrong with what status says of a full disk; empty: nothing."""
    argv = [sys.executable, "-m", "atoll", "status", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True)
    said = done.stdout
    return "" if "o space left" in said or "full" in said else f"status: {said}{done.stderr}"


def judged(drawn: Drawn, victim: RankProcess, new: Sequence[Fault], left_out: set[str]) -> str:
    """What is wrong with what our run wrote down; empty: nothing."""
    wanted = WRITTEN[drawn.kind]
    told = [(fault.kind, fault.blame, fault.node, fault.rank) for fault in new]
    if wanted is None:
        ending = [f for f in new if f.kind in ENDING and f.blame != "code"]  # a full disk: code
        return f"a fault where there was none: {told}" if ending or left_out else ""
    kind, blame = wanted
    same = [fault for fault in new if fault.kind == kind and blame in (None, fault.blame)]
    if not same:
        return f"not told as {wanted}: {told}"
    if blame == "node" or kind == "slow":
        if {fault.node for fault in same} != {victim.node}:
            return f"it was {victim.node}: {told}"
        allowed = {victim.node} if blame == "node" else {victim.node, *left_out}
        return "" if left_out <= allowed else f"left out: {sorted(left_out)}"
    return f"left out: {sorted(left_out)}" if left_out else ""
