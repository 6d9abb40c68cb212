"""`atoll status RUN`: is it queued, running, finished or failed, and why."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll import run_dir
from atoll.cluster.follow import follow
from atoll.errors import UserError
from atoll.settings import load_run

USAGE = """usage: atoll status [--follow] RUN …

Says of each run (the folder, or its name in runs/) where it stands, and why.
--follow    of one run: loss, tokens/s and time left, line by line, until it has ended"""
# Slurm's states (squeue's manual, JOB STATE CODES) -> ours; any other state has failed.
SLURM_STATES = {
    "PENDING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_HOLD": "queued",
    "CONFIGURING": "queued",
    "RUNNING": "running",
    "COMPLETING": "running",
    "STAGE_OUT": "running",
    "SIGNALING": "running",
    "RESIZING": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
    "COMPLETED": "finished",
}
# What a failed job's state means for a person.
REASONS = {
    "TIMEOUT": "its wall time was over, without time to save: see restart.notice_seconds",
    "OUT_OF_MEMORY": "a node's memory was full: fewer microbatch_samples, or more nodes",
    "NODE_FAIL": "a node failed: the same line again goes on from the last checkpoint",
    "CANCELLED": "it was cancelled: the same line again goes on from the last checkpoint",
    "PREEMPTED": "another job took its nodes: the same line again goes on",
}
# qstat's one-letter states (PBS's manual, qstat) -> ours.
PBS_STATES = {"Q": "queued", "H": "queued", "W": "queued", "R": "running", "E": "running"}


@dataclass(frozen=True)
class Job:
    """What the scheduler says of a job."""

    state: str  # queued, running, finished, failed, or unknown
    why: str


def main(argv: list[str]) -> int:
    """Print one line for each run, and below it what the job said last if it failed."""
    words = [word for word in argv if word != "--follow"]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if "--follow" in argv:
        return follow(run_folder(words[0]), status)
    for word in words:
        folder = run_folder(word)
        state, why = status(folder)
        print(f"{folder.name}: {state}, {why}" if why else f"{folder.name}: {state}")
    return 0


def run_folder(word: str) -> Path:
    """The folder of a run that is named by its path, or by its name in runs/."""
    for folder in (Path(word), Path("runs") / word):
        if run_dir.settings_file(folder).is_file():
            return folder
    raise UserError(f"no run at {word}", "give the folder of a run, as runs/NAME")


def status(folder: Path) -> tuple[str, str]:
    """State and reason of a run: what it wrote itself counts first, then what its job says."""
    run = load_run(run_dir.settings_file(folder))
    progress = _progress(folder)
    exported = run_dir.export(folder).is_dir() or run.training.steps == 0
    if run_dir.result_file(folder).is_file() and exported:
        return "finished", _result(folder)
    jobs = queued_jobs(folder)
    if not jobs:
        if _is_held(folder):
            return "running", progress
        where = "here" if run.facility.scheduler == "none" else "by hand"
        return "not finished", f"{progress}; it was started {where}, no scheduler knows of it"
    scheduler, job_id = jobs[-1]
    job = ASK[scheduler](job_id)
    restarts = _count_lines(run_dir.restarts_file(folder))
    again = f", restarted {restarts} times" if restarts else ""
    why = "; ".join(text for text in (job.why, progress) if text)
    return job.state, f"job {job_id}{again}: {why}"


def _is_held(folder: Path) -> bool:
    """A run that was started here locks its folder for as long as it goes on (proc's manual)."""
    locks, inode = Path("/proc/locks"), folder.stat().st_ino
    lines = locks.read_text().splitlines() if locks.is_file() else []
    return any("FLOCK" in line and f":{inode} " in line for line in lines)


def queued_jobs(folder: Path) -> list[tuple[str, str]]:
    """Scheduler and id of each job that was queued for the run."""
    file = run_dir.jobs_file(folder)
    lines = file.read_text().splitlines() if file.exists() else []
    return [(scheduler, job) for scheduler, job in (line.split() for line in lines)]


def slurm_job(job_id: str) -> Job:
    """Ask the queue, then the accounting; what neither knows is unknown."""
    live = _asked(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r"])
    if live:
        state, _, reason = live[-1].partition("|")
    else:
        past = _asked(
            [
                *("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}"),
                "--format=State,ExitCode",
            ]
        )
        if not past:
            return Job("unknown", "neither squeue nor sacct knows the job")
        state, _, exit_code = past[-1].partition("|")
        reason = f"exit code {exit_code}"
    word = state.split()[0]  # "CANCELLED by 1000"
    ours = SLURM_STATES.get(word, "failed")
    known = REASONS.get(word, f"{word}, {reason}")
    words = {"queued": f"waits for {reason}", "running": "", "finished": "", "failed": known}
    return Job(ours, words[ours])


def pbs_job(job_id: str) -> Job:
    """Ask qstat; a job that it does not know any more has ended."""
    lines = _asked(["qstat", job_id])
    if not lines:
        return Job("failed", "its job has ended before the run was finished: see pbs.out")
    letter = lines[-1].split()[-2]
    return Job(PBS_STATES.get(letter, "failed"), "")


ASK: dict[str, Callable[[str], Job]] = {"slurm": slurm_job, "pbs": pbs_job}


def _asked(argv: list[str]) -> list[str]:
    try:
        done = subprocess.run(argv, capture_output=True, text=True)
    except OSError:
        return []
    return [line for line in done.stdout.splitlines() if line] if done.returncode == 0 else []


def _progress(folder: Path) -> str:
    """The last step that was written down."""
    steps = [record.get("step") for record in run_dir.metrics(folder)]
    known = [step for step in steps if step is not None]
    return f"step {max(known)} is the last one written down" if known else "no step yet"


def _result(folder: Path) -> str:
    result = json.loads(run_dir.result_file(folder).read_text())
    figures = {name: value for name, value in result.items() if name not in ("steps", "targets")}
    said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"{result['steps']} steps, {said}"


def _count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0
