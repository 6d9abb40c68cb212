"""Goodput: what became of each node-second of a run, from its ledger and its jobs' accounting.

Node-seconds, since a job holds all its nodes whatever one of them does. The columns beside `queue`
add up to what the jobs held.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.jobs import sacct
from atoll.cluster.scheduler import answer_lines
from atoll.cluster.status import queued_jobs
from atoll.health.faults import Fault, faults
from atoll.settings import load_run
from atoll.settings.exchange import GOODPUT_COLUMNS

USEFUL = ("input", "compute", "communication")
# a rank's phase -> the column; the others are columns themselves
COLUMN_OF = {"optimizer": "compute", "export": "checkpoint"}
NEAR_SECONDS = 2.0  # clocks of nodes and of the scheduler, which counts whole seconds
Line = dict[str, Any]


@dataclass(frozen=True)
class JobStart:
    """One start of a job: when, by the scheduler's clock, and on how many nodes."""

    submitted: float
    started: float
    ended: float
    nodes: int

    @property
    def node_seconds(self) -> float:
        return (self.ended - self.started) * self.nodes


@dataclass(frozen=True)
class RanksStart:
    """One start of the ranks: its lines, and the step that the next start went on from."""

    lines: Sequence[Line]
    redone_from: int | None  # None: no later start

    @property
    def began(self) -> float:
        return float(self.lines[0]["time"])

    @property
    def launched(self) -> float:
        """When its first rank was started."""
        return self.began - float(sum(self.lines[0]["seconds"].values()))


def goodput(run_folder: Path) -> dict[str, float]:
    """Node-seconds of a run by column; empty for one whose ranks never began."""
    lines = ledger(run_folder)
    if not lines:
        return {}
    nodes = load_run(run_dir.settings_file(run_folder)).nodes
    return spent(_jobs(run_folder, lines, nodes), ranks_starts(lines), faults(run_folder), nodes)


def span(run_folder: Path) -> tuple[float | None, float | None]:
    """From when to when a run was in its jobs, as if they had followed each other without a pause.

    To its last line; what `goodput` tells of, but the queue, lies in between. None where its ranks
    never began.
    """
    lines = ledger(run_folder)
    if not lines:
        return None, None
    jobs = _jobs(run_folder, lines, nodes=1)
    pauses = sum(max(0.0, after.started - job.ended) for job, after in pairwise(jobs))
    return jobs[0].started + pauses, float(lines[-1]["time"])


def _jobs(run_folder: Path, lines: Sequence[Line], nodes: int) -> list[JobStart]:
    return job_starts(run_folder) or noted(run_folder, nodes) or by_itself(lines, nodes)


def effective(columns: Mapping[str, float]) -> float:
    """The share of what was held, without the queue, in which the run got on."""
    all_seconds = sum(seconds for name, seconds in columns.items() if name != "queue")
    return sum(columns[name] for name in USEFUL) / all_seconds if all_seconds else 0.0


def ledger(run_folder: Path) -> list[Line]:
    """The lines of a run's ledger."""
    return run_dir.records(run_dir.ledger_file(run_folder))


def ranks_starts(lines: Iterable[Line]) -> list[RanksStart]:
    """The starts of the ranks, each with its lines."""
    parts: list[list[Line]] = []
    for line in lines:
        if line["event"] == "start" or not parts:
            parts.append([])
        parts[-1].append(line)
    resumed = [*(part[0]["step"] for part in parts[1:]), None]
    return [RanksStart(part, step) for part, step in zip(parts, resumed, strict=False)]


def job_starts(run_folder: Path) -> list[JobStart]:
    """What Slurm's accounting has of a run's jobs, a requeued one once for each start.

    Of a finished run as it was kept: a scheduler forgets its jobs after some months.
    """
    file = run_dir.accounting_file(run_folder)
    if file.is_file():
        return sorted(_kept(json.loads(file.read_text())["jobs"]), key=lambda job: job.started)
    ids = [job for scheduler, job in queued_jobs(run_folder) if scheduler == "slurm"]
    command = [*sacct(ids, "Submit,Start,End,NNodes"), "--duplicates"]
    in_seconds = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    rows = [line.split("|") for line in answer_lines(command, in_seconds)] if ids else []
    starts = [
        JobStart(float(submit), float(start), float(end) if end.isdecimal() else now, int(nodes))
        for now in [time.time()]
        for submit, start, end, nodes in (row for row in rows if len(row) == 4)
        if submit.isdecimal() and start.isdecimal()
    ]
    return sorted(starts, key=lambda start: start.started)


def _kept(jobs: Iterable[Mapping[str, Any]]) -> Iterator[JobStart]:
    for job in jobs:
        submitted, started, ended, nodes = (
            job.get(name) for name in ("submitted", "started", "ended", "nodes")
        )
        if submitted and started and ended and nodes:
            yield JobStart(float(submitted), float(started), float(ended), int(nodes))


def noted(run_folder: Path, nodes: int) -> list[JobStart]:
    """Without accounting: from when each job took the run until it left it, by the first note.

    One that left without a note held it as long as its ranks wrote, until the next began.
    """
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    file = run_dir.held_file(run_folder)
    for line in file.read_text().splitlines() if file.is_file() else ():
        with suppress(ValueError):  # a line that was not written whole
            event, lease, at = line.split()
            (began if event == "began" else ended).setdefault(lease, float(at))
    times = [float(line["time"]) for line in ledger(run_folder)]
    nexts = [*list(began.values())[1:], math.inf]
    return [
        JobStart(start, start, ended.get(lease) or _last(times, start, until), nodes)
        for (lease, start), until in zip(began.items(), nexts, strict=False)
    ]


def _last(times: Sequence[float], start: float, until: float) -> float:
    return max((at for at in times if start <= at <= until), default=start)


def by_itself(lines: Sequence[Line], nodes: int) -> list[JobStart]:
    """Without either: each start of the ranks is a job, from their first second to the last."""
    return [
        JobStart(start.launched, start.launched, float(start.lines[-1]["time"]), nodes)
        for start in ranks_starts(lines)
    ]


def spent(
    jobs: Sequence[JobStart],
    starts: Sequence[RanksStart],
    known_faults: Sequence[Fault],
    nodes: int,
) -> dict[str, float]:
    """Node-seconds by column; a job's nodes beyond those of the run are idle."""
    columns = dict.fromkeys(GOODPUT_COLUMNS, 0.0)
    if not jobs:
        return {}
    free = 0.0  # when the job before ended: a requeued one is submitted once
    for job in jobs:
        columns["queue"] += max(0.0, job.started - max(job.submitted, free)) * job.nodes
        free = job.ended
        mine = [start for start in starts if _job_of(start, jobs) is job]
        for name, seconds in of_job(job, mine, known_faults).items():
            columns[name] += seconds * min(nodes, job.nodes)
        columns["idle"] += (job.ended - job.started) * max(0, job.nodes - nodes)
    return columns


def _job_of(start: RanksStart, jobs: Sequence[JobStart]) -> JobStart:
    """The job that was running then; clocks may differ where none was."""
    then = [job for job in jobs if job.started <= start.began <= job.ended]
    begun = then or [job for job in jobs if job.started <= start.began + NEAR_SECONDS]
    return begun[-1] if begun else jobs[0]


def of_job(
    job: JobStart, starts: Sequence[RanksStart], known_faults: Sequence[Fault]
) -> dict[str, float]:
    """Seconds of one start of a job by column; they add up to its length."""
    columns = dict.fromkeys(GOODPUT_COLUMNS, 0.0)
    ends = [*(start.launched for start in starts[1:]), job.ended]
    clock = job.started
    for start, end in zip(starts, ends, strict=False):
        columns["start"] += max(0.0, start.began - clock)
        for name, seconds in of_steps(start).items():
            columns[name] += seconds
        last = max(clock, float(start.lines[-1]["time"]))
        for name, seconds in of_tail(start, last, end, known_faults).items():
            columns[name] += seconds
        clock = max(last, end)
    if not starts:  # its ranks never got so far
        columns["start"] += job.ended - job.started
    rest = job.ended - job.started - sum(columns.values())
    columns["idle"] += max(0.0, rest)
    # its first and its last second are whole ones of the scheduler
    columns["start"] -= min(max(0.0, -rest), NEAR_SECONDS, columns["start"])
    return columns


def of_steps(start: RanksStart) -> dict[str, float]:
    """Seconds between the lines of a start of the ranks; what was done again later is lost."""
    columns = dict.fromkeys(GOODPUT_COLUMNS, 0.0)
    for before, line in pairwise(start.lines):
        seconds = {
            phase: total - before["seconds"].get(phase, 0.0)
            for phase, total in line["seconds"].items()
        }
        if start.redone_from is not None and line["step"] > start.redone_from:
            columns["lost"] += sum(seconds.values())
            continue
        for phase, length in seconds.items():
            columns[COLUMN_OF.get(phase, phase)] += length
    return columns


def of_tail(
    start: RanksStart, last: float, end: float, known_faults: Sequence[Fault]
) -> dict[str, float]:
    """Seconds behind the last line of a start: nobody moved, or work was under way and is lost."""
    if start.lines[-1]["event"] == "end":
        return {"idle": max(0.0, end - last)}
    fault = next((f for f in known_faults if last <= f.time <= end + NEAR_SECONDS), None)
    if fault is None:
        return {"lost": max(0.0, end - last)}
    until = min(fault.time, end)
    column = "stalled" if fault.kind == "stalled" else "lost"
    return {column: until - last, "idle": max(0.0, end - until)}
