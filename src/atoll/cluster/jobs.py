"""What the schedulers say of jobs: one question for all of them, every state with a name."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.cluster.scheduler import answer_lines
from atoll.commands import MISSING, Finished, run_command

# ours -> Slurm's states (squeue's manual, JOB STATE CODES)
SLURM_STATES = {
    "queued": """PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT
        POWER_UP_NODE""",
    "running": """RUNNING COMPLETING STAGE_OUT SIGNALING RESIZING STOPPED SUSPENDED EXPEDITING
        UPDATE_DB""",
    "finished": "COMPLETED",
    "failed": """BOOT_FAIL CANCELLED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY
        PREEMPTED RECONFIG_FAIL REVOKED TIMEOUT""",
}
# What a job's state means for a person.
REASONS = {
    "OUT_OF_MEMORY": "a node's memory was full: fewer microbatch_samples, or more nodes",
    "NODE_FAIL": "a node failed: the same line again goes on from the last checkpoint",
    "BOOT_FAIL": "a node did not start: the same line again goes on from the last checkpoint",
    "CANCELLED": "it was cancelled: the same line again goes on from the last checkpoint",
    "PREEMPTED": "another job took its nodes: the same line again goes on",
    "SUSPENDED": "suspended by the scheduler",
    "STOPPED": "suspended by the scheduler",
}
# why Slurm queued a job again, where it did so itself
QUEUED_AGAIN = {"NODE_FAIL": "a node failed", "PREEMPTED": "another job took its nodes"}
# qstat's one-letter states (qstat's manual of PBS; C is of Torque) -> ours
PBS_STATES = {
    "queued": {"Q": "", "H": "held", "W": "waits for its time", "T": "in transit to its server"},
    "running": {"R": "", "E": "", "B": "", "S": "suspended by the scheduler", "U": "suspended"},
    "failed": {"F": "", "C": "", "X": ""},
}
PBS_STATES["queued"]["M"] = "moved to another server"
PBS_ENDED = "its job has ended before the run was finished: see pbs.out"
# Exit_status of a job that did not end by itself (pbs_job.h; 256 and the signal)
PBS_EXITS = {
    "-29": "its wall time was over",
    "271": "it was cancelled: the same line again goes on from the last checkpoint",
}
PBS_EXITS["143"] = PBS_EXITS["271"]  # our own shells hear TERM, and end with this
# qstat of a job that PBS knows no more; its exit code is the low byte of pbs_errno
GONE = re.compile(r"unknown job|has finished|invalid job id", re.IGNORECASE)
GONE_CODES = (153, 35)  # PBSE_UNKJOBID, PBSE_HISTJOBID

JobId = tuple[str, str]  # scheduler and id


@dataclass(frozen=True)
class Job:
    """What the scheduler says of a job."""

    state: str  # queued, running, finished, failed, or unknown
    why: str
    code: str = ""  # the scheduler's own word


def ask(jobs: Iterable[JobId]) -> dict[JobId, Job]:
    """What the schedulers say of these jobs; each scheduler is asked once, for all of them."""
    answers: dict[JobId, Job] = {}
    for scheduler in sorted({scheduler for scheduler, _ in jobs}):
        ids = list(dict.fromkeys(job for name, job in jobs if name == scheduler))
        answers |= {(scheduler, job): answer for job, answer in ASK[scheduler](ids).items()}
    return answers


def slurm_jobs(ids: Sequence[str]) -> dict[str, Job]:
    """Ask the queue, then the accounting for those that do not run; the rest is unknown."""
    columns = "%A|%F|%T|%r"  # the job, or the array that it is of
    command = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}"]
    live = _rows(answer_lines([*command, f"--format={columns}"]), 4)
    queue = {name: (state, why) for job, array, state, why in live for name in (array, job)}
    still = [job for job in ids if queue.get(job, ("",))[0] != "RUNNING"]
    past: dict[str, list[list[str]]] = {}
    if still:
        records = answer_lines([*sacct(still, "JobIDRaw,State,ExitCode,NodeList"), "--duplicates"])
        for job, *record in _rows(records, 4):
            past.setdefault(job, []).append(record)
    return {job: _slurm_job(queue.get(job), past.get(job, [])) for job in ids}


def _slurm_job(live: tuple[str, str] | None, past: Sequence[Sequence[str]]) -> Job:
    if live is None and not past:
        return Job("unknown", "neither squeue nor sacct knows the job")
    state, reason = live or (past[-1][0], "")
    code = state.split()[0]  # "CANCELLED by 1000"
    ours = next((ours for ours, codes in SLURM_STATES.items() if code in codes.split()), "unknown")
    exit_code = f"exit code {past[-1][1]}" if past else reason
    again = ""
    for earlier, _, nodes in past[: len(past) if live is None else None]:
        cause = QUEUED_AGAIN.get(earlier.split()[0])
        again = f"{cause} (it ran on {nodes}), so it was queued again; " if cause else again
    reasons = {
        "queued": f"{again}waits for {reason}",
        "running": REASONS.get(code, ""),
        "finished": "",
        "failed": REASONS.get(code, f"{code}, {exit_code}"),
        "unknown": f"the scheduler calls it {code}",
    }
    return Job(ours, reasons[ours], code)


def pbs_jobs(ids: Sequence[str]) -> dict[str, Job]:
    """Ask qstat, for ended jobs too; one that it does not know any more has ended."""
    done = run_command(["qstat", *ids])
    if done.returncode == MISSING or "onnect" in done.stderr:
        return {job: Job("unknown", done.last_line) for job in ids}
    letters, calls = _letters(done.stdout.splitlines()), [done]
    ended = [job for job in ids if _number(job) not in letters]
    if ended:
        # it fails where it knows one of them no more, and tells of the others
        calls.append(run_command(["qstat", "-x", *ended]))
        letters |= _letters(calls[-1].stdout.splitlines())
    answers = {job: _pbs_job(job, letters.get(_number(job))) for job in ids}
    # any other failure of qstat says nothing of a job: it may run
    unsaid = [job for job in ended if _number(job) not in letters]
    unsaid = [job for job in unsaid if not any(_is_gone(job, call) for call in calls)]
    return answers | {job: Job("unknown", calls[-1].last_line) for job in unsaid}


def _is_gone(job: str, done: Finished) -> bool:
    """Whether qstat says that PBS knows a job no more: by its words, else by its exit code."""
    lines = [line for line in done.stderr.splitlines() if GONE.search(line)]
    named = [_number(word) for line in lines for word in line.split() if word[0].isdigit()]
    return _number(job) in named if named else done.returncode in GONE_CODES


def _pbs_job(job: str, letter: str | None) -> Job:
    for ours, letters in PBS_STATES.items():
        if letter in letters and ours != "failed":
            return Job(ours, letters[letter], letter)
    if letter is not None and letter not in PBS_STATES["failed"]:
        return Job("unknown", f"the scheduler calls it {letter}", letter)
    lines = answer_lines(["qstat", "-x", "-f", job]) if letter else []
    status = next((line.split()[-1] for line in lines if line.startswith("Exit_status")), None)
    why = PBS_ENDED if status is None else PBS_EXITS.get(status, f"exit code {status}: see pbs.out")
    return Job("failed", why, letter or "")


def _letters(lines: Iterable[str]) -> dict[str, str]:
    """Job's number -> its letter; qstat's columns are id, name, user, time, letter, queue."""
    rows = [line.split() for line in lines]
    return {_number(row[0]): row[-2] for row in rows if len(row) > 3 and row[0][:1].isdigit()}


def _number(job: str) -> str:
    return job.partition(".")[0]


def _rows(lines: Iterable[str], columns: int) -> list[list[str]]:
    """The lines of so many columns; what a site's wrapper adds is none."""
    return [row for row in (line.split("|") for line in lines) if len(row) == columns]


def sacct(ids: Sequence[str], columns: str) -> list[str]:
    """The question to Slurm's accounting, one line for each job."""
    jobs = ["--allocations", f"--jobs={','.join(ids)}", f"--format={columns}"]
    return ["sacct", "--noheader", "--parsable2", *jobs]


ASK: Mapping[str, Callable[[Sequence[str]], dict[str, Job]]] = {
    "slurm": slurm_jobs,
    "pbs": pbs_jobs,
}
