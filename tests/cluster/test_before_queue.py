"""What submit says of a run before it queues it, and what it keeps of that."""

import io
import json
import sys

import pytest

from atoll import run_dir
from atoll.cluster import before_queue, submit
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
    assert kept()["predicted"]["queue_seconds"]["value"] >= 0


def test_a_dry_run_says_it_beside_the_commands_and_asks_nobody(scheduler, here, capsys):
    assert submit.main([*QUEUED, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("sbatch --parsable ") and "at least" not in said.out
    assert said.err.startswith("x: at least ") and said.err.count("\n") == 1
    assert not (here / "calls").exists() and not (here / "runs").exists()


def test_saves_are_counted_by_what_a_node_writes(here):
    plain, known = (
        before_queue.prediction_of(compose([*QUEUED, *words]).run)
        for words in ((), ("facility.node.file_write_gb_s=2",))
    )
    assert plain.saving_seconds is None and known.node_hours > plain.node_hours
    certificate = run_dir.certificate(compose([*QUEUED]).run)
    found = {"facility": "lumi", "measured_on": "2026-11-25", "file_write_gb_s": 2.0}
    run_dir.write_whole(certificate, json.dumps(found))
    assert before_queue.prediction_of(compose([*QUEUED]).run).node_hours == known.node_hours


def test_a_machine_without_rates_says_nothing_and_one_with_them_does(scheduler, here, capsys):
    words = ["facility=laptop", "model=llama_tiny", "training.steps=8", "name=y", "--dry-run"]
    assert submit.main(words) == 0
    assert "y: " not in capsys.readouterr().err
    own = {"product_tflops_fp32": {"64": 0.1}, "product_tflops_bf16": {"64": 0.1}}
    own |= {"attention_tflops": {"64": 0.1}, "memory_gb_s": 9.0, "optimizer_gb_s": 9.0}
    own |= {"logits_gb_s": 9.0, "blocks_per_us": 1e-3, "block_gb_s": 9.0}
    link = {"latency_us": 100.0, "gb_s": 1.0}
    links = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), link)
    rates = {"measured_on": "2026-11-24", "device": "cpu", "cores": 2, "ranks": 2}
    rates |= {"alone": own, "together": own, "collectives": links}
    certificate = {"facility": "laptop", "measured_on": "2026-11-24", "rates": rates}
    run_dir.write_whole(here / "facilities" / "laptop.json", json.dumps(certificate))
    assert submit.main(words) == 0
    said = capsys.readouterr().err
    assert said.startswith("y: about ") and said.rstrip().endswith("by rates measured here")
    learned = {
        "step": [{"family": "fsdp", "size": n, "factor": 2.0, "runs": 7} for n in range(-16, 8)]
    }
    certificate["calibration"] = learned | {"memory": [], "start_seconds": 9.0}
    run_dir.write_whole(here / "facilities" / "laptop.json", json.dumps(certificate))
    assert submit.main(words) == 0
    again = capsys.readouterr().err
    assert again.rstrip().endswith("from 7 runs here") and "9 s of each job to start" in again
    assert float(again.split()[2]) == pytest.approx(2 * float(said.split()[2]), rel=0.01)


def test_the_prediction_follows_the_settings_submitted_last(scheduler):
    assert submit.main([*QUEUED, "nodes=2"]) == 0
    assert submit.main([*QUEUED, "nodes=4"]) == 0
    run = compose([*QUEUED, "nodes=4"]).run
    said = before_queue.prediction_of(run).record(run, "")["predicted"]
    assert kept()["predicted"] == said | {"queue_seconds": kept()["predicted"]["queue_seconds"]}


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
        before_queue.confirm(run, is_said=False)


def test_the_budget_is_what_the_facility_s_own_command_says(scheduler, composed):
    scheduler("quota", "echo 'project x, left: 1,234 of 5,000 node-hours'")
    words = ("facility.budget.command=[quota]", r"facility.budget.pattern='left: ([\d,]+)'")
    words = (*words, "facility.budget.per_node_hour=1")
    assert before_queue.node_hours_left(composed(*QUEUED, *words).run) == 1234
    scheduler("quota", "exit 1")
    assert before_queue.node_hours_left(composed(*QUEUED, *words).run) is None
    assert before_queue.node_hours_left(composed(*QUEUED, "facility.budget.command=[]").run) is None
    with pytest.raises(UserError, match="0 groups"):
        composed(*QUEUED, "facility.budget.pattern=left")


# facility, account -> the lines that its documents show, and the node-hours in them
SHOWN = {
    ("lumi", "project_465000001"): (
        """\
Project             |                    CPU (used/allocated)|               GPU (used/allocated)|
--------------------------------------------------------------------------------------------------
project_465000001   |              0/1000   (0.0%) core/hours|          60/300  (20.0%) gpu/hours|
""",
        60.0,
    ),
    ("leonardo", "Proj_B"): (
        """\
account start end total localCluster totConsumed totConsumed monthTotal monthConsumed
                       (local h) Consumed(local h) (local h) % (local h) (local h)
-----------------------------------------------------------------------------------
Proj_A 20110323 20300323 50000 25000 55027726 50.0 600 600
Proj_B 20220427 20301231 100000 10000 27086 10.0 731 731
""",
        90_000 / 32,
    ),
    ("karolina", "OPEN-00-01"): (
        """\
PID         Resource type    Days left      Total     Used      By me     Free
----------  ---------------  -------------  --------  --------  --------  --------
OPEN-00-00  Karolina GPU      249                42         0         0        17
OPEN-00-01  Karolina CPU      249                42         0         0        41
            Karolina GPU      249               100        58         5        42
""",
        42.0,
    ),
    ("polaris", "ProjectX"): (
        """\
Totals:
  Rows: 1
  Polaris:
    Available Balance: 43,967.2 node hours
    Charged          : 6,032.8 node hours
""",
        43_967.2,
    ),
}


@pytest.mark.parametrize(("facility", "account"), SHOWN)
def test_a_facility_s_own_command_as_its_documents_show_it(
    scheduler, composed, here, facility, account
):
    text, hours = SHOWN[facility, account]
    (here / "shown").write_text(text)
    run = composed(f"facility={facility}", f"facility.account={account}", "image=none").run
    scheduler(run.facility.budget.command[0], 'echo "$*" > asked; cat shown')
    assert before_queue.node_hours_left(run) == pytest.approx(hours)
    assert "{" not in (here / "asked").read_text()
    nobody = composed(f"facility={facility}", "facility.account=nobody", "image=none").run
    assert facility == "polaris" or before_queue.node_hours_left(nobody) is None


@pytest.mark.parametrize(("facility", "account"), SHOWN)
def test_a_budget_is_found_by_the_account_in_upper_and_in_lower_case(
    scheduler, composed, here, facility, account
):
    text, hours = SHOWN[facility, account]
    (here / "shown").write_text(text)
    for name in (account.lower(), account.upper()):
        run = composed(f"facility={facility}", f"facility.account={name}", "image=none").run
        scheduler(run.facility.budget.command[0], "cat shown")
        assert before_queue.node_hours_left(run) == pytest.approx(hours), name


def test_what_the_account_cannot_pay_is_refused_with_the_steps_that_it_can(scheduler, here):
    words = [*QUEUED, "facility.budget.command=[quota]", r"facility.budget.pattern='left: (\d+)'"]
    words += ["facility.budget.per_node_hour=1", "training.steps=100000000"]
    scheduler("quota", "echo left: 5")
    with pytest.raises(UserError, match=r"at least .* node-hours, and x has 5 left") as no:
        submit.main(words)
    fitting = no.value.hint.split()[0]
    assert fitting.startswith("training.steps=") and not list((here / "runs").glob("*"))
    assert submit.main([*words, fitting]) == 0
    assert submit.main([*words, "--yes"]) == 0


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
    assert before_queue.start_in(words) == start


def test_a_scheduler_without_an_answer_is_no_error(scheduler):
    scheduler("sbatch", "exit 1")
    assert before_queue.expected_start(["sbatch", "--parsable"], {"PATH": "/usr/bin"}) is None
    assert before_queue.expected_start(["no-such-program"], {"PATH": "/usr/bin"}) is None


def test_a_start_that_has_passed_is_now():
    assert before_queue.seconds_until("2001-01-01 00:00") == 0.0
    assert before_queue.seconds_until("2901-01-01 00:00") > 86_400
