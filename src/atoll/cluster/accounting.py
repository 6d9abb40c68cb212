"""What Slurm's accounting has of a run's jobs, kept beside the run: `sacct` forgets, files do not.

Without accounts, users, names of nodes and paths: it travels with the proof of the run's model.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.jobs import SLURM_STATES, sacct
from atoll.cluster.scheduler import answer_lines
from atoll.cluster.status import UNKNOWN, queued_jobs
from atoll.errors import UserError, printable
from atoll.proof.accounting import is_stated, state_accounting
from atoll.proof.crate import as_text
from atoll.proof.statement import UNREADABLE
from atoll.settings.exchange import JobRecord

COLUMNS = (
    "JobIDRaw,Cluster,Partition,NNodes,ElapsedRaw,Submit,Start,End,ConsumedEnergyRaw,State,ExitCode"
)
ENDED = {*SLURM_STATES["finished"].split(), *SLURM_STATES["failed"].split()}
Record = dict[str, Any]


def keep_accounting(run_folder: Path) -> None:
    """Keep the records of a finished run's jobs, once all have ended, and state them in its proof.

    Of a run that was given more steps its later jobs are kept too: its newer export states all.
    Nothing is kept where there is no accounting: the proof names that gap; nor in somebody else's
    folder, which may be looked at all the same.
    """
    if not os.access(run_folder, os.W_OK):
        return
    file = run_dir.accounting_file(run_folder)
    if not run_dir.result_file(run_folder).is_file():
        return
    kept = _kept(file) if file.is_file() else []
    known = {record["job"] for record in kept}
    ids = [job for job in slurm_ids(run_folder) if job not in known]
    if ids and not (kept and is_stated(run_folder)):
        records = slurm_records(ids)
        last = {record["job"]: record["state"] for record in records}
        if last.keys() != set(ids) or not ENDED.issuperset(last.values()):
            return
        jobs = [*kept, *records]
        run_dir.write_whole(file, as_text({"format_version": 1, "from": "sacct", "jobs": jobs}))
    if file.is_file():
        state_accounting(run_folder)


def _kept(file: Path) -> list[Record]:
    try:
        jobs: list[Record] = json.loads(file.read_text())["jobs"]
        for job in jobs:
            JobRecord.model_validate(job)
    except UNREADABLE as error:
        found = f"{file} cannot be read: {type(error).__name__}: {printable(str(error), 200)}"
        raise UserError(
            found, "get the original back, or delete it: sacct is asked again"
        ) from None
    return jobs


def slurm_ids(run_folder: Path) -> list[str]:
    return [job for scheduler, job in queued_jobs(run_folder) if scheduler == "slurm"]


def slurm_records(ids: Sequence[str]) -> list[Record]:
    """A record for each start of these jobs, a requeued one once for each; none: nobody knows."""
    if not ids:
        return []
    in_seconds = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    lines = answer_lines([*sacct(ids, COLUMNS), "--duplicates"], in_seconds)
    rows = [line.split("|") for line in lines]
    return [_record(row) for row in rows if len(row) == len(COLUMNS.split(","))]


def _record(row: Sequence[str]) -> Record:
    job, cluster, partition, nodes, elapsed, submitted, started, ended, energy, state, code = row
    joules = _number(energy)
    return {
        "job": job,
        "cluster": cluster,
        "partition": partition,
        "nodes": _number(nodes),
        "elapsed_seconds": _number(elapsed),
        "submitted": _number(submitted),
        "started": _number(started),
        "ended": _number(ended),
        "energy_joules": joules if joules and joules < UNKNOWN else None,  # 0: not measured
        "state": state.split()[0],  # CANCELLED by 1000: whose number that is does not travel
        "exit_code": code,
    }


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
