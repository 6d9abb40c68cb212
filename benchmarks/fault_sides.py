"""Three ways to train on the testbed's Slurm that the same faults can meet: ours, and two peers."""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import drawn_faults
from drawn_faults import RankProcess

from atoll import run_dir
from atoll.cluster import goodput
from atoll.health import heartbeat

CLONE = Path(__file__).resolve().parents[1]
RUNS = Path("/var/tmp/atoll-goodput")
NODES, RANKS_PER_NODE, STEPS, SAVED_EVERY, STALL_SECONDS = 2, 2, 240, 5, 4
PEER_TIMEOUT_SECONDS = 60
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


def submit_spared(folder: Path) -> None:
    """With a spare node; behind a time limit every other run goes on in another job."""
    number = folder.name.rpartition("-")[2]
    is_requeued = not number.isdecimal() or int(number) % 2 == 1
    submit(folder, "spare_nodes=1", f"facility.requeue={str(is_requeued).lower()}")


def our_side() -> Side:
    return Side(
        "ours",
        submit_spared,
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
