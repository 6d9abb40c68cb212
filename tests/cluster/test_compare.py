"""The same tokens at several facilities: soonest done first, and what is not known is said."""

import json

import pytest

from atoll import run_dir
from atoll.cluster import plan
from atoll.cluster.compare import past_waits_seconds
from atoll.config.compose import compose
from atoll.errors import UserError

WORDS = ["model=llama_tiny", "image=none", "precision=bf16", "training.steps=100"]
WORDS += ["facility.account=x", "training.global_batch_samples=64"]
RATES = ["facility.node.device_memory_gb_s=1000", "facility.node.link_gbps=1000"]
RATES += ["facility.network.gbps=400"]


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def compared(capsys, names, *words):
    assert plan.main([*WORDS, *words, "--facilities", names, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def waited(name, facility, *seconds):
    folder = compose([*WORDS, f"facility={facility}", f"name={name}"]).run.folders.runs / name
    run_dir.write_whole(run_dir.jobs_file(folder), "slurm 7\n")
    run_dir.write_whole(run_dir.prediction_file(folder), json.dumps({"facility": facility}))
    jobs = [{"submitted": 1000, "started": 1000 + each} for each in seconds]
    run_dir.write_whole(run_dir.accounting_file(folder), json.dumps({"jobs": jobs}))


def test_the_soonest_done_is_first_and_what_is_not_known_last(here, capsys):
    waited("a", "lumi", 7200, 3600, 60)
    waited("b", "leonardo", 10)
    waited("c", "leonardo", 30)
    found = compared(capsys, "lumi,leonardo,generic_slurm,karolina", *RATES)
    rows = found["facilities"]
    assert [row["facility"] for row in rows][:2] == ["leonardo", "lumi"]
    assert rows[0]["queue_hours"] == pytest.approx(20 / 3600) and rows[0]["queue_from"] == "2 jobs"
    assert rows[1]["queue_hours"] == 1.0
    assert rows[1]["done_hours"] == rows[1]["queue_hours"] + rows[1]["hours"]
    assert rows[2]["queue_hours"] is None and rows[2]["done_hours"] is None
    assert found["tokens"] == 100 * 64 * 512


def test_the_same_tokens_where_a_step_takes_more_of_them(here, capsys):
    words = [*RATES, "training.global_batch_samples=null", "training.device_batch_samples=1"]
    words += ["sharding=ddp"]
    found = compared(capsys, "lumi,leonardo", *words)
    rows = {row["facility"]: row for row in found["facilities"]}
    assert found["tokens"] == 100 * 8 * 512  # of the first named: eight devices a node
    alone = compared(capsys, "leonardo,lumi", *words)
    assert alone["tokens"] == 100 * 4 * 512
    again = {row["facility"]: row for row in alone["facilities"]}
    for name in rows:
        assert rows[name]["hours"] == pytest.approx(2 * again[name]["hours"])


def test_a_person_reads_a_table_and_the_line_that_submits(here, capsys):
    words = [*WORDS, "facility.node.link_gbps=null"]
    assert plan.main([*words, "--facilities", "karolina,lumi"]) == 0
    said = capsys.readouterr().out
    assert "?" in said and "karolina states no rate for" in said
    assert said.splitlines()[-1].startswith("sbatch/train.sbatch ")


def test_a_facility_that_takes_no_such_job_is_last_and_says_why(here, capsys):
    rows = compared(
        capsys, "karolina,lumi", "nodes=20", "training.global_batch_samples=160", *RATES
    )["facilities"]
    assert [row["facility"] for row in rows] == ["lumi", "karolina"]
    assert rows[1]["hours"] is None and "at most 16 nodes, not 20" in rows[1]["why"]
    tight = ["model=llama2_7b", "facility.node.device_memory_gib=1"]
    rows = compared(capsys, "leonardo,lumi", *tight, *RATES)["facilities"]
    assert all("no strategy fits" in row["why"] and row["hours"] is None for row in rows)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--facilities", "lumi"], "compares 1 facilities"),
        (["--facilities", "lumi,leonardo", "facility=karolina"], "names another"),
        (["--facilities", "lumi,leonardo", "training.steps=null", "training.epochs=1"], "epochs"),
        (["--facilities", "lumi,leonard"], "leonard"),
        (["--facilities", "lumi,leonardo", "training.steps=0"], "leaves none to compare"),
    ],
)
def test_mistakes_are_two_lines(here, words, found):
    with pytest.raises(UserError, match=found):
        plan.main([*WORDS, *words])


def test_a_facility_is_priced_with_what_plan_would_choose_there(here, capsys):
    words = ["model=llama2_7b", "nodes=8", "training.global_batch_samples=512", *RATES]
    found = compared(capsys, "leonardo,lumi", *words)
    for row in found["facilities"]:
        assert plan.main([*WORDS, *words, f"facility={row['facility']}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["chosen"] == row["strategy"]


def test_a_stated_strategy_that_does_not_fit_is_no_offer(here, capsys):
    words = ["model=llama2_7b", "nodes=8", "sharding=ddp", *RATES]
    for row in compared(capsys, "leonardo,lumi", *words)["facilities"]:
        assert row["hours"] is row["memory_gib"] is None
        assert "needs" in row["why"] and "of the 64 GiB of a device" in row["why"]


def test_a_facility_without_jobs_has_no_history(here):
    assert past_waits_seconds(compose([*WORDS, "facility=lumi"]).run) == []
