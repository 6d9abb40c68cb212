"""`atoll status RUN`: is it queued, running, finished or failed, and why; what its jobs drew."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.scheduler import answer_lines
from atoll.commands import VerbParser
from atoll.errors import UserError
from atoll.settings import load_run

ABOUT = "Say of each run (the folder, or its name in runs/) where it stands, and why."
POLL_SECONDS = 2.0
LIVE = ("queued", "running", "unknown")
# ours -> Slurm's states (squeue's manual, JOB STATE CODES); any other state has failed
SLURM_STATES = {
    "queued": "PENDING REQUEUED REQUEUE_HOLD CONFIGURING",
    "running": "RUNNING COMPLETING STAGE_OUT SIGNALING RESIZING STOPPED SUSPENDED",
    "finished": "COMPLETED",
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
ENERGY_SOURCE = "measured: Slurm"
UNKNOWN = 2**63  # Slurm's word for no value is one of the largest numbers of 64 bits


@dataclass(frozen=True)
class Job:
    """What the scheduler says of a job."""

    state: str  # queued, running, finished, failed, or unknown
    why: str


def main(argv: list[str]) -> int:
    """Print one line for each run; with --follow, of the first, until it has ended."""
    parser = VerbParser("status", ABOUT)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or its name")
    lines = "of one run: loss, tokens/s and time left, line by line, until it has ended"
    parser.add_argument("--follow", action="store_true", help=lines)
    arguments = parser.read(argv)
    if arguments.follow:
        return follow(run_folder(arguments.runs[0]))
    for name in arguments.runs:
        folder = run_folder(name)
        state, why = status(folder)
        print(f"{folder.name}: {state}, {why}" if why else f"{folder.name}: {state}")
    return 0


def run_folder(name: str) -> Path:
    """The folder of a run that is named by its path, or by its name in runs/."""
    for folder in (Path(name), Path("runs") / name):
        if run_dir.settings_file(folder).is_file():
            return folder
    raise UserError(f"no run at {name}", "give the folder of a run, as runs/NAME")


def status(folder: Path) -> tuple[str, str]:
    """State and reason of a run: what it wrote itself counts first, then what its job says."""
    run = load_run(run_dir.settings_file(folder))
    progress = _last_step(folder)
    exported = run_dir.export(folder).is_dir() or run.training.steps == 0
    if run_dir.result_file(folder).is_file() and exported:
        return "finished", _result(folder)
    jobs = queued_jobs(folder)
    if not jobs:
        if _is_locked(folder):
            return "running", progress
        where = "here" if run.facility.scheduler == "none" else "by hand"
        return "not finished", f"{progress}; it was started {where}, no scheduler knows of it"
    scheduler, job_id = jobs[-1]
    job = ASK[scheduler](job_id)
    restarts = _count_lines(run_dir.restarts_file(folder))
    counted = f", restarted {restarts} times" if restarts else ""
    why = "; ".join(text for text in (job.why, progress) if text)
    return job.state, f"job {job_id}{counted}: {why}"


def _is_locked(folder: Path) -> bool:
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
    live = answer_lines(
        ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r"]
    )
    if live:
        state, _, reason = live[-1].partition("|")
    else:
        past = answer_lines(_sacct([job_id], "State,ExitCode"))
        if not past:
            return Job("unknown", "neither squeue nor sacct knows the job")
        state, _, exit_code = past[-1].partition("|")
        reason = f"exit code {exit_code}"
    code = state.split()[0]  # "CANCELLED by 1000"
    ours = next((ours for ours, codes in SLURM_STATES.items() if code in codes.split()), "failed")
    known = REASONS.get(code, f"{code}, {reason}")
    reasons = {"queued": f"waits for {reason}", "running": "", "finished": "", "failed": known}
    return Job(ours, reasons[ours])


def pbs_job(job_id: str) -> Job:
    """Ask qstat; a job that it does not know any more has ended."""
    lines = answer_lines(["qstat", job_id])
    if not lines:
        return Job("failed", "its job has ended before the run was finished: see pbs.out")
    letter = lines[-1].split()[-2]
    return Job(PBS_STATES.get(letter, "failed"), "")


ASK: dict[str, Callable[[str], Job]] = {"slurm": slurm_job, "pbs": pbs_job}


def _last_step(folder: Path) -> str:
    """The last step that was written down."""
    steps = [record.get("step") for record in run_dir.metrics(folder)]
    known = [step for step in steps if step is not None]
    return f"step {max(known)} is the last one written down" if known else "no step yet"


def _result(folder: Path) -> str:
    result = json.loads(run_dir.result_file(folder).read_text())
    figures = {name: value for name, value in result.items() if name not in ("steps", "targets")}
    listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"{result['steps']} steps, {listed}"


def _count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def follow(folder: Path) -> int:
    """Print each new line until the run has ended, by its status; 0 if it is finished."""
    printed, state_before = 0, ""
    while True:
        state, why = status(folder)
        lines = run_dir.metrics(folder)
        printed = min(
            printed, len(lines)
        )  # a run that resumes forgets what came after its checkpoint
        steps = next((line["steps"] for line in lines if "steps" in line), 0)
        for line in lines[printed:]:
            if text := _progress(line, steps):
                print(text, flush=True)
        printed = len(lines)
        if state != state_before:
            print(f"{folder.name}: {state}, {why}", flush=True)
        if state not in LIVE:
            return int(state != "finished")
        state_before = state
        time.sleep(POLL_SECONDS)


def _progress(line: dict[str, Any], steps: int) -> str:
    """What one line of metrics says to a person; empty for those that say nothing to one."""
    if line["event"] == "train":
        minutes, seconds = divmod(round((steps - line["step"]) * line["step_seconds"]), 60)
        rate = f"{line['tokens_per_second']:,.0f} tokens/s"
        place = f"step {line['step']:>6}/{steps}"
        return f"{place}  loss {line['loss']:.4f}  {rate}  {minutes}:{seconds:02d} left"
    if line["event"] == "evaluation":
        figures = {name: x for name, x in line.items() if isinstance(x, float) and name != "time"}
        listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        return f"step {line['step']:>6}  held-out {listed}"
    if line["event"] == "checkpoint":
        return f"step {line['step']:>6}  saved in {line['save_seconds']:.1f} s"
    return ""


def slurm_energy(jobs: Sequence[tuple[str, str]]) -> tuple[float, str] | None:
    """Joules of all nodes of a run's jobs, and where the number comes from.

    `jobs`: scheduler and id of each, as `queued_jobs` gives them. None where Slurm has no
    figure: no plugin for it (AcctGatherEnergyType), no accounting, or no job of Slurm's.
    """
    ids = [job for scheduler, job in jobs if scheduler == "slurm"]
    # with duplicates: a job that was requeued is one line for each start
    command = [*_sacct(ids, "ConsumedEnergyRaw"), "--duplicates"]
    known = [int(line) for line in answer_lines(command) if line.isdecimal()] if ids else []
    joules = sum(figure for figure in known if figure < UNKNOWN)
    return (float(joules), ENERGY_SOURCE) if joules else None


def _sacct(ids: Sequence[str], columns: str) -> list[str]:
    jobs = ["--allocations", f"--jobs={','.join(ids)}", f"--format={columns}"]
    return ["sacct", "--noheader", "--parsable2", *jobs]
