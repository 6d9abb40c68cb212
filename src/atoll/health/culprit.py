"""Who is at fault, from what all nodes wrote down of their ranks: pure functions.

The surest sign first: a process that is gone without a word, or an error of a rank's own; a process
that is stopped; a node that says nothing; the rank that is not where the others wait for it.
What fails because a peer is gone is no sign of anything.
"""

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from atoll.health.faults import Blame, Fault
from atoll.health.node_record import PEER_ERROR, NodeRecord, RankState, signal_name

Place = tuple[NodeRecord, RankState]

# A device that is broken says so in an error of its rank.
DEVICE_ERROR = re.compile(
    r"uncorrectable ECC|ECC error|hardware stack error|fallen off the bus|NVLink|"
    r"devices? (is|are) (busy or )?unavailable|no CUDA-capable device|CUDA unknown error|"
    r"device is visible to rank|hipErrorNoDevice|HSA_STATUS_ERROR|GPU (is|was) lost",
    re.IGNORECASE,
)
USER_ERROR = "UserError:"
# Of a fault in the program, or of a broken memory: it does not say which.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# A watcher hears of a death later than a rank hears of it from its sockets.
LATE_SECONDS = 5.0


def culprit(nodes: Sequence[NodeRecord], node_count: int, missing_speaks: bool) -> Fault | None:
    """The fault of this start; None where there is none to tell of, as of a user's mistake.

    missing_speaks: a node that wrote nothing had the time to.
    """
    places = [(node, rank) for node in nodes if node.reason for rank in node.ranks]
    if not places or is_mistake(places):
        return None
    silent = [node for node in nodes if not node.reason]
    fault = (
        first_end(places)
        or stopped(places)
        or (unreachable(silent, node_count - len(nodes)) if missing_speaks else None)
        or behind(places)
        or nobody(places, silent)
    )
    return replace(fault, time=min(node.time for node in nodes if node.reason))


def is_mistake(places: Sequence[Place]) -> bool:
    """A mistake that ranks found before the first step, and told in two lines."""
    return all(r.error.startswith(USER_ERROR) and r.phase == "start" for _, r in places)


def first_end(places: Sequence[Place]) -> Fault | None:
    """The first rank that is gone, or that failed by itself."""
    gone = [place for place in places if place[1].is_gone]
    own = [(n, r) for n, r in places if r.error and not PEER_ERROR.search(r.error)]
    causes = [place for place in gone if not crashed_in_exchange(place[1])]
    ends = [
        (n.time - LATE_SECONDS, gone_fault(n, r, gone))
        for n, r in (causes if causes or own else gone)
    ]
    ends += [(r.moved, error_fault(n, r)) for n, r in own]
    return min(ends, key=lambda end: end[0])[1] if ends else None


def crashed_in_exchange(rank: RankState) -> bool:
    """As gloo and NCCL may when a peer goes away."""
    return rank.killed_by in CRASHES and (rank.phase == "communication" or bool(rank.pending))


def gone_fault(node: NodeRecord, rank: RankState, gone: Sequence[Place]) -> Fault:
    crashed = rank.killed_by in CRASHES
    how = f" by {signal_name(rank.killed_by)}" if rank.killed_by else ""
    blame: Blame = "unknown" if crashed else "node"
    evidence = f"its process is gone{how}, and left no error"
    if node.memory_kills and not crashed:
        evidence = "its process is gone: the kernel killed it, for the job's memory was full there"
        return of(node, rank, "died", "code", evidence)
    return of(node, rank, "died", blame, evidence + of_whole_node(node, gone, "gone"))


def error_fault(node: NodeRecord, rank: RankState) -> Fault:
    blame: Blame = "node" if DEVICE_ERROR.search(rank.error) else "code"
    return of(node, rank, "died", blame, f"it failed: {rank.error}")


def stopped(places: Sequence[Place]) -> Fault | None:
    """A rank whose process is stopped cannot answer; the others wait for it."""
    still = [(n, r) for n, r in places if r.is_stopped and r.is_at_work]
    if not still:
        return None
    node, rank = still[0]
    evidence = f"its process is stopped (state {rank.process})"
    evidence += of_whole_node(node, still, "stopped") + who_waits(places)
    return of(node, rank, "stalled", "node", evidence, awaited(places))


def unreachable(silent: Sequence[NodeRecord], unheard: int) -> Fault | None:
    """A node that wrote nothing down when all others did."""
    if silent:
        node = silent[0]
        rank = node.ranks[0].rank if node.ranks else None
        evidence = f"the node says nothing any more, nor do its {len(node.ranks)} ranks"
        return Fault("died", "node", evidence, node=node.node, rank=rank)
    if unheard > 0:
        evidence = f"{unheard} nodes never said anything"
        return Fault("died", "unknown", evidence)
    return None


def behind(places: Sequence[Place]) -> Fault | None:
    """The rank that does not wait, while others wait: for it."""
    working = [(n, r) for n, r in places if r.is_at_work]
    begun = any(is_begun(rank) for _, rank in working)
    waiting = [(n, r) for n, r in working if (is_begun(r) if begun else r.pending)]
    free = [place for place in working if place not in waiting]
    if waiting and free:
        node, rank = min(free, key=lambda place: order(place[1]))
        evidence = why_behind(rank) + who_waits(places)
        return of(node, rank, "stalled", blame_of(rank), evidence, awaited(places))
    return in_another_collective(waiting) or first_behind(working)


def is_begun(rank: RankState) -> bool:
    """On a device, whether what a rank waits for has begun, or only stands in its queue."""
    return bool(rank.pending) and rank.pending[0].get("state") == "started"


def in_another_collective(waiting: Sequence[Place]) -> Fault | None:
    """All wait, but not all for the same."""
    calls = Counter(call_of(rank) for _, rank in waiting)
    if len(calls) < 2:
        return None
    usual = calls.most_common(1)[0][0]
    others = [(n, r) for n, r in waiting if call_of(r) != usual]
    node, rank = min(others, key=lambda place: order(place[1]))
    evidence = f"it waits there, {calls[usual]} others in {usual}"
    return of(node, rank, "stalled", "code", evidence, call_of(rank))


def first_behind(working: Sequence[Place]) -> Fault | None:
    """By step and phase alone, where no recorder says who waits."""
    if len({order(rank)[:3] for _, rank in working}) < 2:
        return None
    node, rank = min(working, key=lambda place: order(place[1]))
    return of(node, rank, "stalled", blame_of(rank), why_behind(rank))


def nobody(places: Sequence[Place], silent: Sequence[NodeRecord]) -> Fault:
    """Nothing singles out a rank; where they stand is still worth a line."""
    working = [(n, r) for n, r in places if r.is_at_work]
    if not working:
        alone = silent[0].node if len(silent) == 1 else ""
        evidence = f"{len(places)} ranks lost a peer" + (", it says nothing" if alone else "")
        return Fault("died", "unknown", evidence, node=alone)
    rank = working[0][1]
    states = {r.process for _, r in working}
    where = "there" if awaited(places) else f"in {rank.phase}"
    disk = ", in a call of the kernel that does not return (state D)" if "D" in states else ""
    evidence = f"none of {len(working)} ranks moves, all are {where}{disk}"
    if silent:
        evidence += f"; {silent[0].node} says nothing"
    node = working[0][0].node if len({n.node for n, _ in working}) == 1 else ""
    number = rank.rank if len(working) == 1 else None
    return Fault(
        kind="stalled",
        blame=blame_of(rank) if len(working) == 1 else "unknown",
        evidence=evidence,
        node=node,
        rank=number,
        device=rank.device if number is not None else "",
        step=rank.step or None,
        phase=rank.phase,
        collective=awaited(places),
        stack=rank.stack,
    )


PHASE_ORDER = ("start", "input", "compute", "optimizer", "communication")


def order(rank: RankState) -> tuple[int, int, int, int]:
    """How far a rank is; first those that did not even answer."""
    place = PHASE_ORDER.index(rank.phase) if rank.phase in PHASE_ORDER else len(PHASE_ORDER)
    return (rank.step, place, int(rank.answered), rank.rank)


def blame_of(rank: RankState) -> Blame:
    """Of a rank that runs and does not come along."""
    if rank.process == "D":
        return "node"
    # a device that hangs and a program that waits for it look the same from here, and so do a
    # loader that is wrong and a file system that is slow
    is_known = rank.device == "cpu" and rank.stack and rank.phase != "input"
    return "code" if is_known else "unknown"


def why_behind(rank: RankState) -> str:
    inside = f" in {rank.stack[-1].rpartition(' in ')[2]}" if rank.stack else ""
    if not rank.pid:
        return "it never began"
    if rank.process == "D":
        return f"it is in a call of the kernel that does not return (state D){inside}"
    if not rank.answered and not rank.stack:
        return "it does not answer"
    return f"it stays{inside} (state {rank.process})"


def who_waits(places: Sequence[Place]) -> str:
    count = sum(bool(rank.pending) for _, rank in places)
    return f"; {count} wait for it there" if count else ""


def awaited(places: Sequence[Place]) -> str:
    """What most ranks wait in."""
    calls = Counter(call_of(rank) for _, rank in places if rank.pending)
    return calls.most_common(1)[0][0] if calls else ""


def call_of(rank: RankState) -> str:
    first = rank.pending[0]
    return f"{first['name']} {first['number']} of group {first['group']}"


def of_whole_node(node: NodeRecord, places: Sequence[Place], how: str) -> str:
    count = sum(other is node for other, _ in places)
    return f", as all {count} of its node" if count == len(node.ranks) > 1 else ""


def of(
    node: NodeRecord, rank: RankState, kind: str, blame: Blame, evidence: str, collective: str = ""
) -> Fault:
    return Fault(
        kind=kind,  # type: ignore[arg-type]
        blame=blame,
        evidence=evidence,
        node=node.node,
        rank=rank.rank,
        device=rank.device,
        step=rank.step or None,
        phase=rank.phase,
        collective=collective or (call_of(rank) if rank.pending else ""),
        stack=rank.stack,
    )
