"""Faults drawn at random against trainings on a real Slurm: who is named, and what is lost.

    make testbed
    python benchmarks/goodput.py [--faults 300] [--minutes 60] [--compared 15] [--check]

Runs of two virtual nodes with a spare one meet faults of ten kinds, each so many steps after the
run got on again; a node that was left out is given back, as if it had been repaired. Where a run
ends, the same line is typed again, and counted. Every run whose batches were all taken has to have
the losses of one without a fault, to the bit. Then the kinds that any training knows meet, in the
same order, our run, a batch job that queues itself again (srun, PyTorch, --requeue), and torchrun
with --max-restarts; their collectives give up after a minute instead of half an hour, which is to
their favour. All sides share two cores with the Slurm they run on: a start takes seconds of work.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import results
from drawn_faults import COMMON, KINDS, LEAST_STEPS, MOST_STEPS, Drawn, draw
from fault_sides import NODES, RANKS_PER_NODE, RUNS, STEPS, Side, our_side, peers
from met_faults import GOES_ON, PATIENCE_SECONDS, Met, come_to, is_live, meet, wait

from atoll import run_dir
from atoll.cluster import goodput
from atoll.cluster.jobs import sacct
from atoll.cluster.scheduler import answer_lines
from atoll.cluster.status import queued_jobs

MEAN_STEPS = (LEAST_STEPS + MOST_STEPS) / 2
MOST_OFF_SACCT = 0.01  # of a run's node-seconds
DISK_MIB = 256


# --- runs of many faults


@contextmanager
def disk() -> Iterator[Path]:
    """A small file system for the runs, that can be full without harm to others."""
    RUNS.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=755", "tmpfs", str(RUNS)]
    subprocess.run(mount, check=True)
    try:
        yield RUNS
    finally:
        subprocess.run(["scancel", "--user=root"], check=False)
        wait(lambda: not subprocess.check_output(["squeue", "-h", "--user=root"]), 60)
        subprocess.run(["umount", "--lazy", str(RUNS)], check=False)
        shutil.rmtree(RUNS, ignore_errors=True)
        shutil.rmtree(RUNS.with_suffix(".prepared"), ignore_errors=True)


def losses(folder: Path) -> dict[int, float]:
    return {
        record["step"]: record["loss"]
        for record in run_dir.metrics(folder)
        if record["event"] == "train"
    }


def finished(side: Side, folder: Path) -> None:
    """Let a run come to its end."""
    come_to(side, folder, 10 * STEPS)
    wait(lambda: not is_live(side, folder), PATIENCE_SECONDS)
    ids = [job for _, job in queued_jobs(folder)]
    wait(lambda: "Unknown" not in answer_lines(sacct(ids, "End")), PATIENCE_SECONDS)


def reference(runs: Path) -> tuple[dict[int, float], float]:
    """The losses of a run without a fault, and the median of the seconds that its steps took."""
    side = our_side()
    folder = runs / "unharmed"
    side.submit(folder)
    finished(side, folder)
    return losses(folder), side.step_seconds(folder)


def ours(
    drawn: list[Drawn], runs: Path, unharmed: dict[int, float], minutes: float
) -> dict[str, Any]:
    """Run after run until every fault has happened, or the time is over: what became of each."""
    over = time.monotonic() + 60 * minutes
    side, all_met, columns, number = our_side(), [], Counter[str](), 0
    differing, accounted = [], []
    pending = [[d for d in drawn if d.kind == "the loss is no number"]]  # their batches differ
    pending.append([d for d in drawn if d.kind != "the loss is no number"])
    for part in pending:
        while part and time.monotonic() < over:
            number += 1
            folder = runs / f"run-{number}"
            side.submit(folder)
            met = until_finished(side, folder, part, runs, over)
            all_met += met
            if not any(each.kind == "the loss is no number" for each in met):
                differing += [folder.name] if losses(folder) != unharmed else []
            spent = goodput.goodput(folder)
            columns.update(spent)
            accounted.append(accounted_error(folder, spent))
            for_later(folder)
    about = {"runs": number, "runs_that_differ": differing, "columns": dict(columns)}
    about |= {"typed_again": len(side.typed), "sums_off_sacct": accounted}
    return about | {"faults": [vars(each) for each in all_met]}


def is_time_for(drawn: Drawn, resumed: int, slow_node: str) -> bool:
    """Whether so many steps are left that it can be seen, and no node is slow already."""
    if drawn.kind == "a node is slow":
        return resumed <= STEPS // 2 and not slow_node
    return drawn.kind != "the loss is no number" or resumed + drawn.steps <= STEPS - 60


def until_finished(
    side: Side, folder: Path, part: list[Drawn], runs: Path, over: float
) -> list[Met]:
    """Take faults from the front of `part` as long as the run trains."""
    met, resumed, slow_node = [], 0, ""
    while time.monotonic() < over:
        following = next((each for each in part if is_time_for(each, resumed, slow_node)), None)
        if following is None or not come_to(side, folder, resumed + following.steps):
            break
        part.remove(following)
        met.append(meet(side, folder, following, runs, slow_node))
        if following.kind == "a node is slow":
            slow_node = met[-1].node
        elif following.kind not in GOES_ON:
            slow_node = ""
        resumed = side.step(folder)
        told = met[-1]
        print(
            f"{folder.name} {told.kind} at step {told.step}: {told.seconds:.1f} s"
            f"{'' if told.right else '; WRONG: ' + told.what}",
            flush=True,
        )
    finished(side, folder)
    return met


def accounted_error(folder: Path, columns: dict[str, float]) -> float:
    """How far the columns are from what Slurm's accounting says the jobs held, as a share."""
    counted = sum(seconds for name, seconds in columns.items() if name != "queue")
    by_sacct = sum(start.node_seconds for start in goodput.job_starts(folder))
    return abs(counted - by_sacct) / by_sacct


def for_later(folder: Path) -> None:
    """Keep what tells of a run, and free its disk."""
    shutil.rmtree(run_dir.checkpoints(folder), ignore_errors=True)
    shutil.rmtree(run_dir.export(folder), ignore_errors=True)


def compared(drawn: Sequence[Drawn], side: Side, runs: Path) -> dict[str, Any]:
    """The same faults at one side: which share of the time was kept.

    By how long its own steps take: how busy the machine is changes from side to side.
    """
    folder = runs / f"compared-{side.name.split()[0]}"
    side.submit(folder)
    come_to(side, folder, 0)
    began, first, met = time.monotonic(), side.step(folder), []
    resumed = first
    for each in drawn:
        if not come_to(side, folder, resumed + each.steps):
            raise RuntimeError(f"{side.name} finished before its last fault")
        met.append(meet(side, folder, each, runs))
        resumed = side.step(folder)
        print(f"{side.name}: {met[-1].kind}: {met[-1].seconds:.1f} s", flush=True)
    wall, kept = time.monotonic() - began, resumed - first
    subprocess.run(["scancel", side.job(folder)], check=False)
    wait(lambda: not is_live(side, folder), PATIENCE_SECONDS)
    return {
        "side": side.name,
        "effective": kept * side.step_seconds(folder) / wall,
        "kept_steps": kept,
        "step_seconds": side.step_seconds(folder),
        "seconds": [each.seconds for each in met],
        "typed_again": len(side.typed),
    }


def by_kind(found: dict[str, Any]) -> None:
    """A table for the terminal, as it is in the docs; seconds are medians."""
    print("| fault | how often | right | told, s | model loaded, s | past the same step, s |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        mine = [each for each in found["faults"] if each["kind"] == kind]
        if mine:
            names = ("told_seconds", "loaded_seconds", "seconds")
            cells = [median_of([each[name] for each in mine]) for name in names]
            right = sum(each["right"] for each in mine)
            print(f"| {kind} | {len(mine)} | {right} | {' | '.join(cells)} |")


def median_of(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{statistics.median(known):.1f}" if known else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--compared", type=int, default=15, help="faults that peers meet too")
    parser.add_argument("--minutes", type=float, default=60, help="after which no more of ours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--check", action="store_true", help="fail where a fault is told wrongly")
    arguments = parser.parse_args()
    if shutil.which("sbatch") is None or os.geteuid() != 0:
        print("no Slurm here\nas root: make testbed", file=sys.stderr)
        return 2
    rank_count = NODES * RANKS_PER_NODE
    with disk() as runs:
        unharmed, step_seconds = reference(runs)
        drawn = draw(arguments.faults, arguments.seed, rank_count, arguments.kinds)
        found = (
            ours(drawn, runs, unharmed, arguments.minutes)
            if drawn
            else {"faults": [], "runs_that_differ": []}
        )
        by_kind(found)
        is_right = kept(found, [], arguments.seed, step_seconds)  # also where the rest is cut off
        common = draw(arguments.compared, arguments.seed, rank_count, COMMON)
        sides = [our_side(), *peers(step_seconds)] if common else []
        tried = [compared(common, side, runs) for side in sides]
    is_right &= kept({"faults": [], "runs_that_differ": []}, tried, arguments.seed, step_seconds)
    return int(not is_right and arguments.check)


def kept(
    found: dict[str, Any], tried: Sequence[dict[str, Any]], seed: int, step_seconds: float
) -> bool:
    """Write the results down; whether every fault was told rightly and every loss is the same."""
    rows, about = [], {"seed": seed, "step_seconds": step_seconds}
    right = [float(each["right"]) for each in found["faults"]]
    if right:
        share = [statistics.mean(right)]
        case = f"{len(right)} faults: told rightly, and nobody else left out"
        rows.append(results.row(case, "share", share, "all", [1.0], "higher", 1.0) | about | found)
        off = [max(found["sums_off_sacct"])]
        case = "a run's node-seconds, difference from sacct's"
        rows.append(results.row(case, "share", off, "allowed", [MOST_OFF_SACCT], "lower", 1.0))
    for peer in tried[1:]:
        case = f"effective time under {len(peer['seconds'])} faults, one about every "
        case += f"{MEAN_STEPS * step_seconds:.1f} s of training"
        mine = tried[0]
        values = ("share", [mine["effective"]], peer["side"], [peer["effective"]], "higher", 1.0)
        rows.append(results.row(case, *values, ours_in_full=mine, peer_in_full=peer, **about))
    return results.record("goodput", rows) and not found["runs_that_differ"]


if __name__ == "__main__":
    sys.exit(main())
