"""`atoll go-on RUN`: what a job does after its ranks failed; its shell, job.sh, asks.

It goes on, without the nodes that the evidence speaks against, as long as steps advance. The last
line on standard output is for the shell: `@atoll again|end NODES`. NODES are those of the next
start inside this job, `-` where another job is needed.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.errors import UserError
from atoll.health import judge
from atoll.health.exclusions import Exclusion, exclude, excluded
from atoll.health.faults import Fault, add_fault, faults_since, in_a_line
from atoll.health.node_record import newest_start, read_nodes
from atoll.health.restarts import add_restart, restarts
from atoll.settings import load_run
from atoll.settings.machine import Restart


@dataclass(frozen=True)
class Start:
    """One start of the ranks that has failed; `faults`: those of this start, the oldest first."""

    began: int  # the step of the newest checkpoint when it began; 0: there was none
    step: int  # the same, now
    faults: Sequence[Fault]

    @property
    def advanced(self) -> bool:
        return self.step > self.began


@dataclass(frozen=True)
class Decision:
    """Whether the ranks start again, why, and without which nodes from now on."""

    again: bool
    why: str
    nodes: Mapping[str, Fault] = field(default_factory=dict)  # node -> the evidence against it


def decide(rules: Restart, start: Start, earlier: Sequence[Mapping[str, Any]]) -> Decision:
    """What follows a failed start. `earlier`: the restarts since a person submitted the run.

    The last fault is the one that ended it, but for a slow rank, which ends nothing: of an end that
    no fault explains, as a full disk, nothing is known that another start would mend. Nodes alone
    are left out, for faults that speak against
    them; an exception is tried again only if steps advanced, data never.
    """
    if not start.faults:
        return Decision(False, "")
    causes = [fault for fault in start.faults if fault.kind != "slow"]
    if not causes:
        return Decision(False, "it was slow, and the job's output says what ended the ranks")
    cause = causes[-1]
    if cause.blame == "data" or cause.kind in ("non_finite", "spike"):  # going back did not help
        return Decision(False, "the same data would come again")
    if cause.blame == "code" and not start.advanced:
        return Decision(False, "an error of the code, and no step was saved since the last start")
    if len(earlier) >= rules.max_restarts:
        counted = f"{len(earlier)} restarts (restart.max_restarts={rules.max_restarts})"
        return Decision(False, f"that was after {counted}")
    if cause.kind != "unfit" and not start.advanced and _was_stuck(earlier):
        return Decision(False, f"no step after {start.step} was saved, twice in a row")
    against = {fault.node: fault for fault in start.faults if fault.blame == "node" and fault.node}
    return Decision(True, in_a_line(cause), against if rules.exclude else {})


def _was_stuck(earlier: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the start before saved no step; one whose node was unfit never began."""
    tries = [record for record in earlier if record.get("kind") != "unfit"]
    return bool(tries) and "began" in tries[-1] and tries[-1]["step"] <= tries[-1]["began"]


def healthy(wanted: int, allocated: Sequence[str], bad: Sequence[str]) -> list[str]:
    """The nodes for the next start inside a job; none where too few are left."""
    short_names = {_short(node) for node in bad}
    nodes = [node for node in allocated if _short(node) not in short_names]
    return nodes[:wanted] if len(nodes) >= wanted else []


def _short(node: str) -> str:
    return node.partition(".")[0]


def main(argv: list[str]) -> int:
    """Decide, write down what was decided, tell a person, and answer the shell."""
    asked = _parser().read(argv)
    try:
        answer = _answer(asked)
    except OSError as error:  # a full disk: the next start could not write either
        _say(f"{error.filename or asked.run}: {error.strerror}; the run ends")
        answer = "end -"
    print(f"@atoll {answer}")
    return 0


def _answer(asked: argparse.Namespace) -> str:
    folder, down = asked.run, dict(word.split("=", 1) for word in asked.down)
    run = load_run(run_dir.settings_file(folder))
    judge.main([str(folder)])  # where the launcher ended the watchers before there was a verdict
    if any(fault.blame in ("code", "data") for fault in faults_since(folder, asked.known_faults)):
        # a node that is slow to answer is no cause beside one
        down = {node: state for node, state in down.items() if state.startswith(("down", "fail"))}
    _add_down_nodes(folder, _with_ranks(folder, down), asked.job)
    step = max(run_dir.complete_checkpoints(folder), default=0)
    start = Start(asked.began, step, faults_since(folder, asked.known_faults))
    decision = decide(run.restart, start, restarts(folder))
    if not decision.again:
        if start.faults:
            _say(f"{in_a_line(start.faults[-1])}; the run ends: {decision.why}")
        return "end -"
    against = _of_this_job(decision.nodes, asked.nodes)
    out = _left_out(folder, against, asked.job)
    inside = [] if asked.time_is_over else healthy(run.nodes, asked.nodes, [*out, *down])
    record: dict[str, Any] = {"kind": start.faults[-1].kind, "evidence": decision.why}
    record |= {"excluded": list(against), "inside": bool(inside), "job": asked.job}
    add_restart(folder, step=step, began=asked.began, **record)
    leaves = f"leaves out {', '.join(against)} (see excluded.json), and " if against else ""
    where = f"on {','.join(inside)}" if inside else "in another job"
    _say(f"{decision.why}; the run {leaves}goes on {where} from step {step}")
    return f"again {','.join(inside) or '-'}"


def _parser() -> CommandParser:
    parser = CommandParser("go-on", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    step = "the step of the newest checkpoint when the ranks started"
    parser.add_argument("--began", type=int, required=True, help=step)
    known = "how many faults were known when the ranks started"
    parser.add_argument("--known-faults", type=int, required=True, help=known)
    names, nodes = (lambda text: text.split(",")), "the nodes of this job"
    parser.add_argument("--nodes", metavar="NODE,…", type=names, default=[], help=nodes)
    down = "a node that the scheduler calls down, and its word for it"
    parser.add_argument("--down", metavar="NODE=STATE", action="append", default=[], help=down)
    parser.add_argument("--job", default="", help="this job")
    parser.add_argument("--time-is-over", action="store_true", help="this job's time, nearly")
    return parser


def _add_down_nodes(folder: Path, down: Mapping[str, str], job: str) -> None:
    """What the scheduler says of a node may be all that is known: its ranks said nothing."""
    for node, state in down.items():
        evidence = f"the scheduler calls the node {state}"
        add_fault(folder, Fault("died", "node", evidence, node=node, job=job, time=time.time()))


def _with_ranks(folder: Path, down: Mapping[str, str]) -> dict[str, str]:
    """Those that ranks ran on, where that is known: a spare that is down ended nothing."""
    start = newest_start(run_dir.node_records(folder))
    used = {_short(record.node) for record in read_nodes(start)} if start else set()
    return {node: state for node, state in down.items() if not used or _short(node) in used}


def _of_this_job(nodes: Mapping[str, Fault], allocated: Sequence[str]) -> dict[str, Fault]:
    """The same by the names that the scheduler knows: it refuses to leave out any other."""
    names = {_short(name): name for name in allocated}
    return {names[_short(node)]: nodes[node] for node in nodes if _short(node) in names}


def _left_out(folder: Path, against: Mapping[str, Fault], job: str) -> list[str]:
    """Leave these nodes out of the run; all that are left out by now."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    reasons = {
        node: Exclusion(fault.kind, in_a_line(fault), job, since) for node, fault in against.items()
    }
    try:
        if reasons:
            exclude(folder, reasons)
        return list(excluded(folder))
    except UserError as error:  # a person was at it: theirs to mend, the run goes on meanwhile
        _say(error.found)
        return list(against)


def _say(text: str) -> None:
    print(f"atoll: {text}", file=sys.stderr)
