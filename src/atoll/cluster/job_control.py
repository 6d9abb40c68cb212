"""`atoll logs RUN` and `atoll cancel RUN`: what a run's jobs print, and an end to them."""

import time
from pathlib import Path

from atoll.cluster.jobs import ask
from atoll.cluster.lease import lease_of
from atoll.cluster.status import (
    LIVE,
    POLL_SECONDS,
    allocations,
    queued_jobs,
    run_folder,
    status,
)
from atoll.cluster.then import then_jobs
from atoll.commands import CommandParser, run_command
from atoll.errors import UserError

LOGS = "Print what the last job of a run has printed; --follow: until the run has ended."
CANCEL = "End the jobs of a run; its state is saved first where there is time, and it can go on."
# scheduler -> the program that ends a job
ENDING = {"slurm": "scancel", "pbs": "qdel"}
ASK_SECONDS = 60.0
OF_RUN = "the folder of a run, or its name in folders.runs"
SEE = "atoll list jobs shows those of all runs of this folder"


def logs(argv: list[str]) -> int:
    """Print a run's output."""
    parser = CommandParser("logs", LOGS)
    parser.add_argument("run", metavar="RUN", help=OF_RUN)
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")
    arguments = parser.read(argv)
    folder = run_folder(arguments.run)
    file = newest_output(folder)
    printed = _print_from(file, 0)
    asked = 0.0
    while arguments.follow:
        if time.monotonic() - asked >= ASK_SECONDS:
            asked = time.monotonic()
            if status(folder)[0] not in LIVE:
                _print_from(file, printed)
                break
        time.sleep(POLL_SECONDS)
        if (newer := newest_output(folder)) != file:
            file, printed = newer, 0
        printed = _print_from(file, printed)
    return 0


def newest_output(folder: Path) -> Path:
    """What the last job of a run printed into; `UserError` where there is nothing yet."""
    # a link to what a scheduler keeps on a node leads nowhere here
    there = [path for path in folder.glob("*.out") if path.exists()]
    files = sorted(there, key=lambda path: path.stat().st_mtime)
    if not files:
        state, why = status(folder)
        raise UserError(
            f"run {folder.name} has printed nothing into {folder}: {state}, {why}",
            "a run that was started here prints on its terminal; see atoll status",
        )
    return files[-1]


def _print_from(file: Path, start: int) -> int:
    """Print a file from a byte on; the byte behind its end."""
    with open(file, "rb") as stream:
        stream.seek(start)
        content = stream.read()
    print(content.decode(errors="replace"), end="", flush=True)
    return start + len(content)


def cancel(argv: list[str]) -> int:
    """End every job of a run that is queued or runs."""
    parser = CommandParser("cancel", CANCEL)
    parser.add_argument("run", metavar="RUN", help=OF_RUN)
    folder = run_folder(parser.read(argv).run)
    theirs = allocations(folder)
    own = [job for job in queued_jobs(folder) if job not in theirs]
    jobs = [*own, *then_jobs(folder)]
    answers = ask(jobs)
    known = [job for job in jobs if job in answers and answers[job].state in LIVE]
    # of which nobody knows whether they are: last, and a scheduler may know them no more
    unknown = {job for job in known if answers[job].state == "unknown"}
    alive = sorted(known, key=lambda job: job in unknown)
    if not alive:
        raise UserError(f"run {folder.name} has no job to cancel: {_how_it_is(folder)}", SEE)
    for scheduler, job in alive:
        done = run_command([ENDING[scheduler], job])
        if done.returncode and (scheduler, job) in unknown and len(unknown) < len(alive):
            continue
        if done.returncode:
            raise UserError(f"{ENDING[scheduler]} {job}: {done.last_line}", SEE)
        print(f"cancelled {scheduler} job {job} of {folder.name}; the same line again goes on")
    return 0


def _how_it_is(folder: Path) -> str:
    lease = lease_of(folder)
    if lease is not None and lease.alive and lease.scheduler == "none":
        return f"it runs on {lease.node} without a scheduler; Ctrl-C there, or kill {lease.job}"
    if lease is not None and lease.alive and (lease.scheduler, lease.job) in allocations(folder):
        return f"it runs on {lease.node} in your allocation {lease.job}; Ctrl-C there"
    return ", ".join(status(folder))
