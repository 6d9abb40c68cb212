"""What submit says of a run before it queues it, and what it keeps of that."""

import io
import json
import sys

import pytest

from atoll import run_dir
from atoll.cluster import bet, submit
from atoll.config.compose import compose
from atoll.errors import UserError

QUEUED = ("facility=lumi", "facility.account=x", "image=none", "precision=bf16", "name=x")
ANSWER = "Job 42 to start at 2026-11-24T03:05:07 using 4 processors on nodes a1 in partition p"


@pytest.fixture
def scheduler(here, monkeypatch):
    """An sbatch that writes down what it is given."""
    programs = here / "programs"
    programs.mkdir()

    def made(name, text):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    made(
        "sbatch",
        'echo "$1" >> calls; case $1 in --test-only) '
        f'echo "sbatch: {ANSWER}" >&2;; *) echo 7;; esac',
    )
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return made


def kept():
    return json.loads(run_dir.prediction_file(run_dir.folder(compose([*QUEUED]).run)).read_text())


def test_one_line_before_the_job_is_queued(scheduler, here, capsys):
    assert submit.main([*QUEUED]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("job 7: ")
    [line] = [text for text in said.err.splitlines() if text.startswith("x: ")]
    assert line.startswith("x: at least ") and line.endswith("; expected to start 2026-11-24 03:05")
    assert (here / "calls").read_text().split() == ["--test-only", "--parsable"]
    assert kept()["predicted"]["step_seconds"]["value"] > 0


def test_a_dry_run_says_it_beside_the_commands_and_asks_nobody(scheduler, here, capsys):
    assert submit.main([*QUEUED, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("sbatch --parsable ") and "at least" not in said.out
    assert said.err.startswith("x: at least ") and said.err.count("\n") == 1
    assert not (here / "calls").exists() and not (here / "runs").exists()


def test_the_prediction_follows_the_settings_submitted_last(scheduler):
    assert submit.main([*QUEUED, "nodes=2"]) == 0
    assert submit.main([*QUEUED, "nodes=4"]) == 0
    assert (
        kept()["predicted"]
        == bet.prediction_of(compose([*QUEUED, "nodes=4"]).run).record(
            compose([*QUEUED, "nodes=4"]).run, ""
        )["predicted"]
    )


def test_what_the_scheduler_refuses_leaves_no_prediction(scheduler, here):
    scheduler("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(UserError, match="Invalid account"):
        submit.main([*QUEUED])
    assert not list((here / "runs").glob("*"))


def test_a_large_run_is_asked_for(scheduler, here, monkeypatch):
    large = [*QUEUED, "confirm.node_hours=0.001", "training.steps=100000"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(
        UserError, match=r"at least .* node-hours .*confirm\.node_hours=0\.001"
    ) as no:
        submit.main(large)
    assert "--yes" in no.value.hint and not (here / "runs").exists()
    for answer, is_queued in (("n\n", False), ("y\n", True)):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        if is_queued:
            assert submit.main(large) == 0
        else:
            with pytest.raises(UserError, match="is not queued"):
                submit.main(large)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert submit.main([*large, "--yes"]) == 0
    assert submit.main([*large, "confirm.node_hours=1e6"]) == 0


def test_where_the_time_is_unknown_the_first_job_counts(composed):
    words = ("facility.node.link_gbps=null", "facility.network.gbps=null", "nodes=2")
    run = composed(*QUEUED, *words, "facility.walltime_minutes=120", "confirm.node_hours=4").run
    with pytest.raises(UserError, match="in its first job up to 4 node-hours"):
        bet.confirm(run, is_said=False)


def test_the_budget_is_what_the_facility_s_own_command_says(scheduler, composed):
    scheduler("quota", "echo 'project x, left: 1,234 of 5,000 node-hours'")
    words = ("facility.budget.command=[quota]", r"facility.budget.pattern='left: ([\d,]+)'")
    assert bet.budget_left(composed(*QUEUED, *words).run) == "1,234"
    scheduler("quota", "exit 1")
    assert bet.budget_left(composed(*QUEUED, *words).run) is None
    assert bet.budget_left(composed(*QUEUED).run) is None
    with pytest.raises(UserError, match="0 groups"):
        composed(*QUEUED, "facility.budget.pattern=left")


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (f"sbatch: {ANSWER}", "2026-11-24 03:05"),
        ("sbatch: Job 42 to start at 2026-11-24T03:05:07 a while from now", "2026-11-24 03:05"),
        ("allocation failure: Requested node configuration is not available", None),
        ("", None),
    ],
)
def test_when_slurm_would_start_it(words, start):
    assert bet.start_in(words) == start


def test_a_scheduler_without_an_answer_is_no_error(scheduler):
    scheduler("sbatch", "exit 1")
    assert bet.expected_start(["sbatch", "--parsable"], {"PATH": "/usr/bin"}) is None
    assert bet.expected_start(["no-such-program"], {"PATH": "/usr/bin"}) is None
