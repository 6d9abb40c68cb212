"""What others do on a fault that Atoll promises to survive: torchrun, Lightning and submitit.

    make testbed
    make bench-faults_of_peers

Each peer trains `peer_steps.py` on two virtual nodes of a real Slurm, asked to restart as its
documents say. The same fault meets each, one after another; written down is what happened within
PATIENCE_SECONDS, and the line of the job's output that names the rank or the node at fault.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_faults
import results

HERE = Path(__file__).resolve().parent
PEERS_FOLDER = HERE.parent / ".build" / "peers"
JOB = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--account=island", "--time=10"]
PATIENCE_SECONDS, FAULT_STEP = 90, 8
ENDED = re.compile(r"COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|DEADLINE")


def queue(folder: Path, flags: list[str], command: str) -> str:
    """A batch job of one line; its id."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{command}\n")
    words = ["sbatch", "--parsable", *JOB, *flags, f"--output={folder}/job.out", "--requeue"]
    return printed([*words, "--open-mode=append", str(script)]).split(";")[0]


def torchrun(folder: Path) -> str:
    agent = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=1"
    meeting = "--max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=n1:29711 --rdzv-id=1"
    return queue(folder, [], f"srun {agent} {meeting} {HERE}/peer_steps.py torchrun {folder}")


def lightning(folder: Path) -> str:
    command = f"srun {sys.executable} {HERE}/peer_steps.py lightning {folder}"
    return queue(folder, ["--signal=SIGUSR1@90"], command)


def submitit(folder: Path) -> str:
    sys.path[:0] = [str(HERE), str(PEERS_FOLDER)]
    import peer_steps
    import submitit as package

    executor = package.AutoExecutor(folder)
    executor.update_parameters(
        nodes=2,
        tasks_per_node=1,
        cpus_per_task=1,
        timeout_min=10,
        slurm_account="island",
        slurm_additional_parameters={"requeue": True},
    )
    return str(executor.submit(peer_steps.Steps(folder)).job_id)


def kill_a_rank(victim: int, node: str) -> None:
    os.kill(victim, signal.SIGKILL)


def stop_a_rank(victim: int, node: str) -> None:
    os.kill(victim, signal.SIGSTOP)


def take_the_node_down(victim: int, node: str) -> None:
    drawn_faults.turn_off(node)


PEERS = {"torchrun": torchrun, "lightning": lightning, "submitit": submitit}
FAULTS: dict[str, Callable[[int, str], None]] = {
    "a rank is killed": kill_a_rank,
    "a rank hangs (SIGSTOP)": stop_a_rank,
    "a node goes down": take_the_node_down,
}


def printed(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def steps(folder: Path) -> list[int]:
    file = folder / "steps.txt"
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def state(job: str) -> str:
    return printed(["scontrol", "show", "job", job]).partition("JobState=")[2].split()[0]


def await_step(folder: Path, job: str) -> None:
    until = time.monotonic() + 180
    while max(steps(folder), default=0) < FAULT_STEP:
        if time.monotonic() > until or ENDED.match(state(job)):
            raise RuntimeError(
                f"job {job} did not reach step {FAULT_STEP}: {words(folder)[-2000:]}"
            )
        time.sleep(0.2)


def words(folder: Path) -> str:
    files = [*folder.glob("*.out"), *folder.glob("*.err")]
    return "\n".join(file.read_text(errors="replace") for file in files)


def outcome(folder: Path, job: str, before: int, patience_seconds: float) -> tuple[str, float]:
    """What becomes of the job behind its fault, and after how many seconds."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < patience_seconds:
        if max(steps(folder)) > before + 2:
            return "goes on by itself", seconds
        if ENDED.match(now := state(job)):
            return f"ended, {now}", seconds
        time.sleep(0.2)
    return f"nothing, {state(job)} all the time", seconds


def naming(text: str, rank: int, node: str) -> str:
    """The first line that names the rank or node at fault; empty where none does."""
    by_name = re.compile(rf"\b{node}: task|\brank\s*:?\s*{rank}\b|\b{node}\b.*(fail|DOWN)", re.I)
    lines = (line.strip() for line in text.splitlines())
    return next((line[:160] for line in lines if by_name.search(line)), "")


def tried(peer: str, fault: str, patience_seconds: float) -> dict[str, Any]:
    """One fault at one peer."""
    folder = Path(tempfile.mkdtemp(prefix=f"fault-{peer}-", dir="/var/tmp"))
    job = PEERS[peer](folder)
    node = ""
    try:
        await_step(folder, job)
        pid, node = (folder / "rank-1").read_text().split()
        before = len(words(folder))
        reached = max(steps(folder))
        FAULTS[fault](int(pid), node)
        what, seconds = outcome(folder, job, reached, patience_seconds)
        line = naming(words(folder)[before:], 1, node)
    finally:
        subprocess.run(["scancel", job], check=False)
        subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)
        if fault == "a node goes down" and node:
            drawn_faults.turn_on(node)
        shutil.rmtree(folder, ignore_errors=True)
    return {"peer": peer, "fault": fault, "outcome": what, "seconds": seconds, "names": line}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds")
    arguments = parser.parse_args()
    if shutil.which("sbatch") is None:
        print("no Slurm here\nas root: make testbed", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PEERS_FOLDER), str(HERE)])
    about = {"benchmark": "faults_of_peers", "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about |= {"machine": results.machine(), "versions": results.versions()}
    for fault in arguments.faults:
        for peer in arguments.peers:
            row = tried(peer, fault, arguments.patience)
            print(
                f"{fault}: {peer}: {row['outcome']} after {row['seconds']:.0f} s"
                f"; names it: {row['names'] or 'no'}",
                flush=True,
            )
            with open(results.FOLDER / "faults_of_peers.jsonl", "a") as file:
                file.write(json.dumps(about | row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
