"""What is kept of sacct's answer, and what never travels."""

import json
import os
import shutil
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.cluster.accounting import COLUMNS, keep_accounting, slurm_records
from atoll.proof import statement
from atoll.proof.accounting import not_kept
from atoll.proof.prove import prove
from atoll.proof.statement import logs_of, read_statement

ENDED = "7|cl|gpu|4|90|100|110|200|0|{}|0:0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two jobs that has written its result; `sacct` prints the file `answer`."""
    program = tmp_path / "bin" / "sacct"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked; cat {tmp_path}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    run_dir.result_file(tmp_path).write_text("{}")
    run_dir.jobs_file(tmp_path).write_text("slurm 7\nslurm 8\nslurm 9\nslurm 9 refused\n")
    return tmp_path


def kept(folder: Path, *lines: str) -> list[dict[str, object]] | None:
    (folder / "answer").write_text("".join(f"{line}\n" for line in lines))
    keep_accounting(folder)
    file = run_dir.accounting_file(folder)
    return json.loads(file.read_text())["jobs"] if file.is_file() else None


def test_nobody_s_name_is_asked_for(folder: Path) -> None:
    assert not {"Account", "User", "UID", "WorkDir", "NodeList"} & set(COLUMNS.split(","))
    kept(folder)
    assert "--jobs=7,8 " in (folder / "asked").read_text()


def test_jobs_are_kept_once_all_have_ended(folder: Path) -> None:
    eight = ENDED.replace("7|", "8|", 1)
    assert kept(folder, ENDED.format("COMPLETED")) is None  # nothing of 8
    assert kept(folder, ENDED.format("COMPLETED"), eight.format("RUNNING")) is None
    # one that was requeued is a line for each start; the last one says how it ended
    lines = [ENDED.format("REQUEUED"), ENDED.format("CANCELLED by 1000")]
    jobs = kept(folder, *lines, "a site's greeting", eight.format("COMPLETED"))
    assert jobs is not None
    assert [job["state"] for job in jobs] == ["REQUEUED", "CANCELLED", "COMPLETED"]
    assert jobs[0]["energy_joules"] is None and jobs[0]["nodes"] == 4
    # what was kept stays, whatever sacct has forgotten since
    assert kept(folder) == jobs


def export_again(folder: Path) -> None:
    """As the last job of a run writes it: when that ends is not known yet."""
    export = run_dir.export(folder)
    shutil.rmtree(export, ignore_errors=True)
    export.mkdir()
    prove(export, statement.Made("run", "x", [], [], gaps=[not_kept("slurm")]), "a card", {})


def stated(folder: Path) -> list[str]:
    return [entry["name"] for entry in logs_of(read_statement(run_dir.export(folder)))]


def test_a_run_that_was_given_more_steps_states_its_later_jobs_too(folder: Path) -> None:
    lines = [ENDED.replace("7|", f"{job}|", 1).format("COMPLETED") for job in (7, 8, 10)]
    export_again(folder)
    assert stated(folder) == ["accounting"]
    first = kept(folder, *lines[:2])
    assert first is not None and stated(folder) == ["run/accounting.json"]
    with open(run_dir.jobs_file(folder), "a") as file:
        file.write("slurm 10\n")
    assert kept(folder, lines[2]) == first  # until there is another export, it is as stated
    export_again(folder)
    assert kept(folder, lines[2].replace("COMPLETED", "RUNNING")) == first
    assert stated(folder) == ["accounting"]
    jobs = kept(folder, lines[2])  # what was before sacct may have forgotten
    assert jobs is not None and [job["job"] for job in jobs] == ["7", "8", "10"]
    assert stated(folder) == ["run/accounting.json"]
    crate = json.loads((run_dir.export(folder) / statement.CRATE).read_text())["@graph"]
    assert len([entity for entity in crate if entity["@type"] == "CreateAction"]) == 4


def test_a_run_without_a_result_and_one_without_slurm_are_not_asked_for(folder: Path) -> None:
    run_dir.result_file(folder).unlink()
    assert kept(folder, ENDED.format("COMPLETED")) is None
    run_dir.result_file(folder).write_text("{}")
    run_dir.jobs_file(folder).write_text("pbs 7.host\n")
    assert kept(folder, ENDED.format("COMPLETED")) is None
    assert not (folder / "asked").exists()
    assert slurm_records([]) == []


@pytest.mark.parametrize(
    ("scheduler", "why"), [("none", "no scheduler"), ("pbs", "PBS"), ("slurm", "not kept yet")]
)
def test_the_gap_has_a_name(scheduler: str, why: str) -> None:
    entry = not_kept(scheduler)
    assert entry["name"] == "accounting" and why in entry["annotations"]["jobs"]
