"""The jobs' accounting in a run's proof: a gap that is named, until the jobs have ended.

An export is written inside its job, of which the scheduler knows the end only later.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.proof.crate import as_text, with_jobs, without_jobs
from atoll.proof.statement import (
    CRATE,
    NAME,
    SIGNATURE,
    UNREADABLE,
    Resource,
    described,
    logs_of,
    read_statement,
    remove_cut_off,
    resource,
    said,
)

GAP = "accounting"
ASKED = ("slurm",)
WHY = {
    "slurm": "not kept yet: `atoll status RUN` keeps it, once its jobs have ended",
    "pbs": "PBS is not asked for it",
    "none": "no scheduler, so none",
}


def steps_counted(records: Iterable[Mapping[str, Any]]) -> int:
    """How many steps the energy of these records is of: a start that was killed wrote none."""
    known = [record for record in records if record["event"] == "energy"]
    spans = [(record.get("first_step", 1), record["step"] + 1) for record in known]
    return len(set().union(*(range(*span) for span in spans)))


def not_kept(scheduler: str) -> Resource:
    """The gap, by its name."""
    return said(GAP, jobs=WHY[scheduler])


def state_accounting(run_folder: Path) -> list[Path]:
    """Put the kept accounting into the proof of the run's exports; those that were changed.

    One that is signed stays as it is, and so does one whose crate is not the stated one.
    """
    return [folder for folder in _proven(run_folder) if _state(folder, run_folder)]


def is_stated(run_folder: Path) -> bool:
    """Whether the proof of an export has the kept accounting, which then stays as it is."""
    name = f"run/{run_dir.accounting_file(run_folder).name}"
    entries = [entry for folder in _proven(run_folder) for entry in logs_of(read_statement(folder))]
    return any(entry["name"] == name for entry in entries)


def _proven(run_folder: Path) -> list[Path]:
    """The run's exports that have a proof."""
    folders = (run_dir.export(run_folder), run_dir.averaged_export(run_folder))
    return [folder for folder in folders if (folder / NAME).is_file()]


def _crate(export: Path) -> dict[str, Any] | None:
    """None where it is missing or is none: `atoll verify` names that."""
    try:
        crate: dict[str, Any] = json.loads((export / CRATE).read_text())
        without_jobs(crate)
    except (FileNotFoundError, *UNREADABLE):
        return None
    return crate


def _state(export: Path, run_folder: Path) -> bool:
    if (export / SIGNATURE).is_file():
        return False
    statement, file = read_statement(export), run_dir.accounting_file(run_folder)
    stated = next((entry for entry in statement["subject"] if entry["name"] == CRATE), None)
    crate = _crate(export)
    if stated is None or crate is None or all(entry["name"] != GAP for entry in logs_of(statement)):
        return False
    # killed between both files, the crate has its jobs already, and the statement has not
    first = as_text(without_jobs(crate)).encode()
    if hashlib.sha256(first).hexdigest() != stated["digest"]["sha256"]:
        return False
    remove_cut_off(export)
    kept = resource("run", run_folder, file.name)
    text = as_text(with_jobs(crate, kept, json.loads(file.read_text())["jobs"])).encode()
    run_dir.write_whole(export / CRATE, text)
    stated |= described(CRATE, len(text), hashlib.sha256(text).hexdigest())
    statement["predicate"]["runDetails"]["byproducts"] = [
        kept if entry["name"] == GAP else entry for entry in logs_of(statement)
    ]
    run_dir.write_whole(export / NAME, as_text(statement))
    return True
