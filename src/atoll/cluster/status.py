"""Where a run stands: is it queued, running, finished or failed, and why; what its jobs drew."""

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.jobs import ASK, Job, JobId, ask, sacct
from atoll.cluster.lease import Lease, lease_of
from atoll.cluster.scheduler import answer_lines
from atoll.cluster.summary import result_of
from atoll.config.stated_folders import own_place, stated_folder
from atoll.errors import UserError
from atoll.health.exclusions import excluded
from atoll.health.faults import ENDING, faults, in_a_line
from atoll.health.restarts import restarts
from atoll.settings import load_run

POLL_SECONDS = 2.0  # of the run's own files
ASK_SECONDS, MOST_ASK_SECONDS = 60.0, 300.0  # of the scheduler, longer while nothing changes
LIVE = ("queued", "running", "unknown")
ENERGY_SOURCE = "measured: Slurm"
UNKNOWN = 2**63  # Slurm's word for no value is one of the largest numbers of 64 bits
FULL_BYTES = 1 << 20  # free bytes below which a job's last words are lost
TAIL_BYTES = 1 << 16
NO_STEP = "no step yet"
# What a job's output says last of why it ended, the surest sign first.
LAST_WORDS = [
    re.compile(r"srun: error: (\S+: tasks? \S+: (?!Exited|Terminated)\w.*)"),
    re.compile(r"atoll: (?!the time of|job )(.*)"),
    re.compile(r"(?:\[rank\d+\]:)?\s*((?:[\w.]+\.)?\w*(?:Error|Exception)\b: .*)"),
    re.compile(r"((?:slurmstepd|srun|mpiexec|FATAL|bash)\b.*)"),
]


def runs_folders() -> list[Path]:
    """Where runs are by default: as your own settings say, and in the clone, which is older."""
    folders = [stated_folder("runs"), own_place("runs")]
    return list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]


def run_folder(name: str) -> Path:
    """The folder of a run that is named by its path, or by its name in `folders.runs`."""
    if run_dir.settings_file(Path(name)).is_file():
        return Path(name)
    for folder in (runs / name for runs in runs_folders()):
        if run_dir.settings_file(folder).is_file():
            return folder
    if (Path(name) / "campaign.json").is_file():
        raise UserError(
            f"{name} is a campaign's, not a run's",
            f"atoll report {name}, or atoll federate --status with the words it was begun with",
        )
    looked = " or in ".join(map(str, runs_folders()))
    raise UserError(
        f"no run at {name}, nor in {looked}", "give the folder that was said when it was submitted"
    )


def status(folder: Path, answers: Mapping[JobId, Job] | None = None) -> tuple[str, str]:
    """State and reason of a run: what it wrote itself counts first, then what its jobs say.

    `answers`: what the schedulers said of its jobs, if they were asked already.
    """
    by_itself = _without_scheduler(folder)
    if by_itself is not None:
        return by_itself
    jobs = queued_jobs(folder)
    if not jobs:  # the run has just left a person's allocation
        return status(folder, answers)
    answers = ask(jobs) if answers is None else answers
    (scheduler, job_id), job = _telling(jobs, answers, lease_of(folder))
    counted = _restarted(folder, job)
    reasons = [job.why]
    if job.code == "TIMEOUT":
        reasons = [_time_was_over(folder)]
    if job.state == "failed":
        reasons.append(_full_disk(folder))
        reasons.append(
            _fault(folder, job_id)
            or run_dir.failure(folder)
            or last_words(folder, scheduler, job_id)
        )
    if job.state == "running":
        reasons += [f"refused job {other}: it holds the run" for other in _refused(folder)]
        reasons.append(_slow(folder, job_id))
    reasons.append(_last_step(folder, job.state == "running"))
    return job.state, f"job {job_id}{counted}: {'; '.join(text for text in reasons if text)}"


def remembered_status(folder: Path) -> tuple[str, str]:
    """The same for who asks often: the scheduler is asked once a minute at most, then less often.

    What it said of a job that lives is kept in the run's folder; the run's own files always count.
    """
    by_itself = _without_scheduler(folder)
    if by_itself is not None:
        return by_itself
    file, now = run_dir.status_file(folder), time.time()
    last: dict[str, Any] = {"until": 0.0, "state": ""}
    if file.is_file():
        last = json.loads(file.read_text())
    # a clock that was ahead does not say so for longer
    if now < last["until"] <= now + MOST_ASK_SECONDS and last["jobs"] == len(queued_jobs(folder)):
        return last["state"], last["why"]
    state, why = status(folder)
    pause = ASK_SECONDS
    if state == last["state"]:
        pause = min(2 * last["pause"], MOST_ASK_SECONDS)
    until = now + pause if state in LIVE else 0.0
    known = {"until": until, "pause": pause, "jobs": len(queued_jobs(folder))}
    run_dir.write_whole(file, json.dumps(known | {"state": state, "why": why}))
    return state, why


def _without_scheduler(folder: Path) -> tuple[str, str] | None:
    """State and reason of a run that is finished, or that no scheduler knows of; else None."""
    run = load_run(run_dir.settings_file(folder))
    exported = run_dir.export(folder).is_dir() or run.training.steps == 0
    if exported and (result := result_of(run, folder)) is not None:
        return "finished", _figures(result)
    if queued_jobs(folder):
        return None
    lease = lease_of(folder)
    if lease is not None and lease.alive:
        lines = filter(None, (_last_step(folder, True), _slow(folder, lease.job)))
        return "running", "; ".join(lines)
    step, failure = _last_step(folder, False), run_dir.failure(folder)
    if failure:
        return "failed", failure if step == NO_STEP else f"{failure}; {step}"
    where = "here" if run.facility.scheduler == "none" else "by hand"
    reasons = (step, _fault(folder), f"it was started {where}, no scheduler knows of it")
    return "not finished", "; ".join(filter(None, reasons))


def _telling(
    jobs: Sequence[JobId], answers: Mapping[JobId, Job], lease: Lease | None
) -> tuple[JobId, Job]:
    """Of a run's jobs the one that says where it stands: one that trains, one that waits, the last.

    Where several train, the one that holds the run.
    """
    known = [(job, answers.get(job, Job("unknown", "not asked for yet"))) for job in jobs]
    for state in ("running", "queued"):
        alive = [(job, answer) for job, answer in known if answer.state == state]
        holders = [pair for pair in alive if lease and pair[0][1] == lease.job]
        if alive:
            return (holders or alive)[-1]
    return known[-1]


def _time_was_over(folder: Path) -> str:
    steps = run_dir.complete_checkpoints(folder)
    saved = f"step {steps[-1]} is saved" if steps else "nothing is saved"
    return (
        f"its wall time was over before it was queued again, {saved}: the same line goes on; "
        "see restart.notice_seconds"
    )


def _restarted(folder: Path, job: Job) -> str:
    """How often the run was started again, and what it leaves out since.

    A last one that was asked for may not have come.
    """
    missed = run_dir.restart_file(folder).exists() and job.state not in LIVE
    records = restarts(folder)
    records = records[: len(records) - int(missed)]
    for_faults = sum("began" in record for record in records)
    why = f" ({for_faults} of them after a fault)" if for_faults else ""
    times = f", restarted {len(records)} times{why}" if records else ""
    with suppress(UserError):  # where a person is at the file
        times += f", without {nodes}" if (nodes := ", ".join(excluded(folder))) else ""
    return times


def _fault(folder: Path, job_id: str | None = None) -> str:
    """Who was at fault for the end of a job, or of a run's last start; empty where nobody was.

    Behind an earlier fault the run went on.
    """
    missed = run_dir.restart_file(folder).exists()
    went_on = [record["time"] for record in restarts(folder) if "began" in record]
    since = max(went_on[: len(went_on) - int(missed)], default=-1.0)
    ends = [fault for fault in faults(folder) if fault.kind in ENDING and fault.time > since]
    if job_id is not None:
        ends = [fault for fault in ends if fault.job == job_id]
    elif ends and run_dir.metrics(folder)[-1:] and run_dir.metrics(folder)[-1]["event"] != "fault":
        ends = []  # the run went on behind it
    return in_a_line(ends[-1]) if ends else ""


def _full_disk(folder: Path) -> str:
    """Nothing else can tell of it: no fault and no last words could be written."""
    if shutil.disk_usage(folder).free >= FULL_BYTES:
        return ""
    return f"no space left on the file system of {folder}"


def _slow(folder: Path, job_id: str) -> str:
    """Who was slow in this job, the last that was named; empty where nobody was."""
    slow = [f for f in faults(folder) if f.kind == "slow" and f.job == job_id]
    return f"slow: {in_a_line(slow[-1])}" if slow else ""


def last_words(folder: Path, scheduler: str, job_id: str) -> str:
    """What a job's output says of why it ended, on one line; empty where there is none."""
    names = (f"{scheduler}-{job_id}.out", f"{scheduler}.out")
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return ""
    with open(file, "rb") as output:
        output.seek(max(0, file.stat().st_size - TAIL_BYTES))
        text = output.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern in LAST_WORDS:
        words = [match[1] for line in lines if (match := pattern.match(line))]
        if words:
            return f"its last words: {words[-1][:200]}"
    return f"its last words: {lines[-1][:200]}" if lines else ""


def queued_jobs(folder: Path) -> list[JobId]:
    """Scheduler and id of each job of the run, in order, without those that were refused.

    An allocation of a person's is one of them while the run is in it, and no longer.
    """
    lines, lease = _job_lines(folder), lease_of(folder)
    refused = {(line[0], line[1]) for line in lines if line[2:] == ["refused"]}
    left = set(allocations(folder))
    if lease is not None and lease.alive:
        left.discard((lease.scheduler, lease.job))
    jobs = dict.fromkeys((line[0], line[1]) for line in lines)
    return [job for job in jobs if job not in refused | left]


def allocations(folder: Path) -> list[JobId]:
    """Those in which a person started the run: they are not the run's to end."""
    return [(line[0], line[1]) for line in _job_lines(folder) if line[2:] == ["here"]]


def _refused(folder: Path) -> list[str]:
    return [line[1] for line in _job_lines(folder) if line[2:] == ["refused"]]


def _job_lines(folder: Path) -> list[list[str]]:
    file = run_dir.jobs_file(folder)
    lines = file.read_text().splitlines() if file.exists() else []
    words = [line.split() for line in lines]
    return [line for line in words if len(line) >= 2 and line[0] in ASK]


def _last_step(folder: Path, with_age: bool) -> str:
    """The last step that was written down, and how long ago that was."""
    metrics = [record for record in run_dir.metrics(folder) if record["event"] != "fault"]
    records = [record for record in metrics if record.get("step") is not None]
    if not records:
        return NO_STEP
    last = max(records, key=lambda record: int(record["step"]))
    text = f"step {last['step']} is the last one written down"
    if not with_age or "time" not in last:
        return text
    minutes, seconds = divmod(max(0, round(time.time() - last["time"])), 60)
    return f"{text}, {minutes} min {seconds} s ago" if minutes else f"{text}, {seconds} s ago"


def _figures(result: Mapping[str, Any]) -> str:
    """Of the weights themselves, not of their average."""
    no_figures = ("steps", "targets", "ema")
    figures = {name: value for name, value in result.items() if name not in no_figures}
    listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"{result['steps']} steps, {listed}"


def follow(folder: Path) -> int:
    """Print each new line until the run has ended, by its status; 0 if it is finished.

    The run's files are read as often as it takes, the scheduler is asked once a minute at most.
    """
    printed, state_before, pause, ask_at = 0, "", ASK_SECONDS, 0.0
    state, why = "unknown", ""
    while True:
        by_itself = _without_scheduler(folder)
        if by_itself is None and time.monotonic() >= ask_at:
            state, why = status(folder)
            pause = min(2 * pause, MOST_ASK_SECONDS) if state == state_before else ASK_SECONDS
            ask_at = time.monotonic() + pause
        state, why = by_itself or (state, why)
        printed = _print_new(folder, printed)
        if state != state_before:
            print(f"{folder.name}: {state}, {why}", flush=True)
        if state not in LIVE:
            return int(state != "finished")
        state_before = state
        time.sleep(POLL_SECONDS)


def _print_new(folder: Path, printed: int) -> int:
    """Print what metrics.jsonl holds after `printed` lines; the number of lines there are."""
    lines = run_dir.metrics(folder)
    steps = next((x["steps"] for x in reversed(lines) if x["event"] == "start"), 0)
    # a run that resumes forgets what came after its checkpoint
    for line in lines[min(printed, len(lines)) :]:
        if text := _progress(line, steps):
            print(text, flush=True)
    return len(lines)


def _progress(line: dict[str, Any], steps: int) -> str:
    """What one line of metrics says to a person; empty for those that say nothing to one."""
    if line["event"] == "train":
        minutes, seconds = divmod(round((steps - line["step"]) * line["step_seconds"]), 60)
        rate = f"{line['tokens_per_second']:,.0f} tokens/s"
        place = f"step {line['step']:>6}/{steps}"
        loss = "skipped" if line["loss"] is None else f"{line['loss']:.4f}"
        return f"{place}  loss {loss}  {rate}  {minutes}:{seconds:02d} left"
    if line["event"] == "guard":
        samples = "samples {} up to {}".format(*line["samples"])
        return f"step {line['at_step']:>6}  {line['kind']}: {line['action']}, {samples}"
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
    command = [*sacct(ids, "ConsumedEnergyRaw"), "--duplicates"]
    known = [int(line) for line in answer_lines(command) if line.isdecimal()] if ids else []
    joules = sum(figure for figure in known if figure < UNKNOWN)
    return (float(joules), ENERGY_SOURCE) if joules else None
