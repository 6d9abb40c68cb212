"""Faults drawn at random against trainings on a real Slurm: who is named, and what is lost.

    make testbed
    python benchmarks/goodput.py [--faults 300] [--minutes 90] [--compared 15] [--check]

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import drawn_faults
import results
from drawn_faults import COMMON, KINDS, Drawn, RankProcess, Scene, draw

from atoll import run_dir
from atoll.cluster import goodput
from atoll.health import heartbeat
from atoll.health.exclusions import excluded, take_back
from atoll.health.faults import ENDING, Fault, faults

CLONE = Path(__file__).resolve().parents[1]
RUNS = Path("/var/tmp/atoll-goodput")
DISK_MIB = 256
NODES, RANKS_PER_NODE, STEPS, SAVED_EVERY, STALL_SECONDS = 2, 2, 240, 5, 5
PATIENCE_SECONDS, SLOW_PATIENCE_SECONDS, PEER_TIMEOUT_SECONDS = 240, 40, 60
LIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "STAGE_OUT", "SUSPENDED"}
WORDS = (
    "facility=testbed",
    "image=none",
    "facility.walltime_minutes=60",
    "facility.node.peak_tflops=0.1",
    f"nodes={NODES}",
    "launcher=static_node",
    "experiment=rehearsal",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    f"training.steps={STEPS}",
    f"checkpoint.every_steps={SAVED_EVERY}",
    "generation.prompt=null",
    "preflight=false",
    f"watch.stall_seconds={STALL_SECONDS}",
    "watch.straggler_seconds=4",
    "restart.max_restarts=100000",
    f"folders.runs={RUNS}",
    f"folders.prepared={RUNS.with_suffix('.prepared')}",
)
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


@dataclass(frozen=True)
class Side:
    """One way to train; `folder`: of one training."""

    name: str
    submit: Callable[[Path], None]
    job: Callable[[Path], str]
    step: Callable[[Path], int]  # the last one that it is past, also one to be done again
    ranks: Callable[[Path], list[RankProcess]]
    starts: Callable[[Path], int]
    step_seconds: Callable[[Path], float]  # the median, where no fault came between two
    is_finished: Callable[[Path], bool]
    typed: list[Path] = field(default_factory=list)  # each time that a person had to


# --- ours


def submit(folder: Path, *words: str) -> None:
    line = [str(CLONE / "sbatch" / "train.sbatch"), *WORDS, f"name={folder.name}", *words]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{done.stdout}{done.stderr}")


def our_job(folder: Path) -> str:
    return run_dir.jobs_file(folder).read_text().splitlines()[-1].split()[1]


def records(folder: Path) -> list[heartbeat.Record]:
    """Of the ranks that run now."""
    pattern = heartbeat.node_folder(folder, "*", 0).name[: -len("*-0")] + "*/rank-*"
    found = [heartbeat.read(file) for file in Path("/dev/shm").glob(pattern)]
    return [r for r in found if r and heartbeat.started_ticks(r.pid) == r.start_ticks]


def our_step(folder: Path) -> int:
    return min((record.step for record in records(folder)), default=1) - 1


def our_ranks(folder: Path) -> list[RankProcess]:
    return [RankProcess(r.rank, drawn_faults.node_of(r.pid), r.pid) for r in records(folder)]


def our_starts(folder: Path) -> int:
    return sum(line["event"] == "start" for line in goodput.ledger(folder))


def our_step_seconds(folder: Path) -> float:
    return per_step(
        [(x["step"], x["time"]) for x in goodput.ledger(folder) if x["event"] == "steps"]
    )


def per_step(steps: Sequence[tuple[int, float]]) -> float:
    """The median of the seconds from one step to the next."""
    return statistics.median(b[1] - a[1] for a, b in pairwise(steps) if b[0] == a[0] + 1)


def our_side() -> Side:
    return Side(
        "ours",
        lambda folder: submit(folder, "spare_nodes=1"),
        our_job,
        our_step,
        our_ranks,
        our_starts,
        our_step_seconds,
        lambda folder: run_dir.result_file(folder).exists(),
    )


# --- peers: peer_steps.py, started in two ways


def peer_side(name: str, command: str, step_seconds: float) -> Side:
    """A batch job of one line. `command`: with FOLDER for its folder."""

    def submit_peer(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{command.replace('FOLDER', str(folder))}\n")
        words = ["sbatch", "--parsable", f"--nodes={NODES}", "--account=island", "--time=60"]
        words += [f"--cpus-per-task={RANKS_PER_NODE}", "--ntasks-per-node=1", "--requeue"]
        words += ["--open-mode=append", f"--output={folder}/job.out", str(script)]
        variables = {"PEER_STEPS": "100000", "PEER_STEP_SECONDS": str(step_seconds)}
        variables |= {"PEER_TIMEOUT_SECONDS": str(PEER_TIMEOUT_SECONDS)}
        job = subprocess.run(
            words, capture_output=True, text=True, check=True, env=os.environ | variables
        ).stdout
        (folder / "job").write_text(job.strip())

    def ranks(folder: Path) -> list[RankProcess]:
        found = []
        for file in folder.glob("rank-*"):
            pid, node, *_ = file.read_text().split()
            if drawn_faults.node_of(int(pid)) == node:
                found.append(RankProcess(int(file.name[5:]), node, int(pid)))
        return found

    return Side(
        name,
        submit_peer,
        lambda folder: (folder / "job").read_text(),
        lambda folder: max((step for step, _ in peer_steps(folder)[-1:]), default=0),
        ranks,
        lambda folder: sum(
            step <= before for (before, _), (step, _) in pairwise(peer_steps(folder))
        ),
        lambda folder: per_step(peer_steps(folder)),
        lambda folder: False,
    )


def peer_steps(folder: Path) -> list[tuple[int, float]]:
    file = folder / "steps.txt"
    text = file.read_text() if file.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [(int(step), float(at)) for step, at in map(str.split, lines)]


def peers(step_seconds: float) -> list[Side]:
    script = f"{sys.executable} {Path(__file__).with_name('peer_steps.py')}"
    tasks = f"--ntasks={NODES * RANKS_PER_NODE} --ntasks-per-node={RANKS_PER_NODE}"
    srun = f"srun {tasks} --cpus-per-task=1 --kill-on-bad-exit=1"
    again = f"{srun} {script} srun FOLDER || scontrol requeue $SLURM_JOB_ID"
    meeting = "--rdzv-backend=c10d --rdzv-endpoint=$(hostname):29711 --rdzv-id=1"
    agent = f"-m torch.distributed.run --nnodes={NODES} --nproc-per-node={RANKS_PER_NODE}"
    # else its agents count their restarts apart and meet in stale stores (pytorch issue 135712)
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    torchrun = (
        f"{own_store} srun {sys.executable} {agent} --max-restarts=1000 {meeting} "
        f"{script.split()[1]} torchrun FOLDER"
    )
    return [
        peer_side("requeue from a checkpoint", again, step_seconds),
        peer_side("torchrun", torchrun, step_seconds),
    ]


# --- a fault meets a training


def wait(ready: Callable[[], Any], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


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
        if time.monotonic() - asked > 2:
            asked = time.monotonic()
            if not is_live(side, folder) and not side.is_finished(folder):
                side.typed.append(folder)
                side.submit(folder)
        time.sleep(0.02)
    return True


@dataclass(frozen=True)
class Met:
    """What became of one fault."""

    kind: str
    step: int
    seconds: float  # until the training was past the same step again
    right: bool  # as it should be: who is named, who is left out, who had to type
    what: str
    node: str


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
    began, starts, what = time.monotonic(), side.starts(folder), ""
    end = drawn_faults.happens(drawn, Scene(ranks, victim, side.job(folder), runs))
    if drawn.kind in GOES_ON:
        patience = SLOW_PATIENCE_SECONDS
        wait(lambda: len(faults(folder)) > known or side.is_finished(folder), patience)
        end()
    elif drawn.kind in BY_A_PERSON:
        wait(lambda: not is_live(side, folder), PATIENCE_SECONDS)
        what = not_told(folder) if drawn.kind == "the disk is full" else ""
        end()
    else:
        wait(lambda: side.starts(folder) > starts or not is_live(side, folder), PATIENCE_SECONDS)
        end()
    come_to(side, folder, step)
    seconds = time.monotonic() - began
    if side.name != "ours":
        return Met(drawn.kind, step, seconds, True, "", victim.node)
    left_out = set(excluded(folder))
    new = faults(folder)[known:]
    what = what or judged(drawn, victim, new, left_out - {slow_node})
    if len(side.typed) > typed and drawn.kind not in BY_A_PERSON:
        what = what or "the line had to be typed again"
    if left_out:
        take_back(folder, sorted(left_out))
    return Met(drawn.kind, step, seconds, not what, what, victim.node)


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
    about |= {"typed_again": len(side.typed), "sums_off_sacct": max(accounted)}
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
    """A table for the terminal, as it is in the docs."""
    print("| fault | how often | right | median s until it was past the same step |")
    print("|---|---|---|---|")
    for kind in KINDS:
        mine = [each for each in found["faults"] if each["kind"] == kind]
        if mine:
            seconds = statistics.median(each["seconds"] for each in mine)
            right = sum(each["right"] for each in mine)
            print(f"| {kind} | {len(mine)} | {right} | {seconds:.1f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--compared", type=int, default=15, help="faults that peers meet too")
    parser.add_argument("--minutes", type=float, default=90, help="after which no more of ours")
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
    for peer in tried[1:]:
        case = f"effective time under {len(peer['seconds'])} faults, one about every "
        case += f"{drawn_faults.MOST_STEPS / 2 * step_seconds:.1f} s of training"
        mine = tried[0]
        values = ("share", [mine["effective"]], peer["side"], [peer["effective"]], "higher", 1.0)
        rows.append(results.row(case, *values, ours_in_full=mine, peer_in_full=peer, **about))
    return results.record("goodput", rows) and not found["runs_that_differ"]


if __name__ == "__main__":
    sys.exit(main())
