"""Predictions beside what happened: of one run, and of all runs of a folder."""

import json
from pathlib import Path

import pytest
import small_run
import torch
import yaml

from atoll import run_dir
from atoll.cluster import before_queue, plan
from atoll.cluster.goodput import goodput
from atoll.cluster.record import outcomes, record_of
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.report import command as report
from atoll.settings import dumped
from atoll.sharding.process_group import World

ALONE = World(0, 1, torch.device("cpu"))
RATES = {"peak_tflops": 1.0, "device_memory_gb_s": 50.0, "link_gbps": 100.0, "device_watts": 90.0}


def test_a_finished_run_has_its_prediction_beside_what_happened(tmp_path, capsys):
    small_run.write_text(tmp_path)
    node = small_run.NODE | RATES
    single = small_run.sharding("single")
    words = {"sharding": single, "facility__node": node, "precision__compute": "bf16"}
    run = small_run.settings(tmp_path, 1, **words)
    folder = small_run.ready(run)
    before_queue.keep_prediction(run)
    small_run.train_here(ALONE, run)
    found = {one.name: one for one in outcomes(folder)}
    assert -0.8 < found["memory_gib"].error < 1.0  # this process holds the tests as well
    assert -0.5 < found["checkpoint_gib"].error < 0  # each tensor has a head, and these are tiny
    for name in ("step_seconds", "hours", "node_hours"):
        assert 0 < found[name].predicted < found[name].measured
    assert found["tokens_per_second"].predicted > found["tokens_per_second"].measured
    assert found["device_kwh"].predicted < found["device_kwh"].measured
    [said] = [line for line in run_dir.metrics(folder) if line["event"] == "prediction"]
    assert said["memory_gib"] == found["memory_gib"].predicted
    assert found["step_seconds"].bound == "at least" and found["memory_gib"].bound == ""
    assert report.main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "Predicted and measured" in text and "memory of the fullest device, GiB" in text
    page = (folder / "report.html").read_text()
    assert page.count("Predicted and measured") >= 2  # a table and a figure
    assert plan.main(["--record", str(folder.parent)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {tuple(line[:2]) for line in lines} == {("here", "single")}
    assert {line[2] for line in lines} == {"memory", "a", "all", "the", "energy"}


def write_run(name: str, memory_gib: float, *words: str, ranks: int = 8) -> Path:
    """A run of three steps that took so much memory, and twice the least time."""
    line = ["facility=lumi", "facility.account=x", "image=none", "precision=bf16", f"name={name}"]
    run = compose([*line, "training.steps=3", *words]).run
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    before_queue.keep_prediction(run)
    predicted = run_dir.predicted(folder)
    seconds = 2 * predicted["step_seconds"]
    figures = {"memory_gib": memory_gib, "step_seconds": seconds, "tokens_per_second": 1 / seconds}
    lines = [{"event": "start", "ranks": ranks, "steps": 3, "training_samples": 64}]
    lines += [{"event": "train", "step": step, **figures} for step in (1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run_dir.write_whole(run_dir.metrics_file(folder), text)
    return folder


def test_the_record_is_by_facility_and_strategy(here, capsys):
    least = run_dir.predicted(write_run("a", 1.0))["memory_gib"]
    write_run("a", least)
    write_run("b", least / 2)
    write_run("c", least * 2, "sharding=ddp")
    write_run("other ranks".replace(" ", "-"), 1.0, "nodes=2")
    (here / "runs" / "broken").mkdir()
    (here / "runs" / "broken" / "prediction.json").write_text("{}")
    rows = {(row["strategy"], row["what"]): row for row in record_of(here / "runs")}
    assert rows.keys() == {
        (strategy, what)
        for strategy in ("ddp", "full_shard")
        for what in ("memory_gib", "step_seconds", "hours")
    }
    memory = rows["full_shard", "memory_gib"]
    assert (memory["runs"], memory["facility"]) == (2, "lumi")
    assert memory["median_error"] == pytest.approx(0.5)
    assert memory["worst_error"] == pytest.approx(1.0)
    assert rows["ddp", "step_seconds"]["worst_error"] == pytest.approx(-0.5)
    assert plan.main(["--record", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record_of(here / "runs")


def test_the_record_holds_what_kept_accounting_says(here):
    folder = write_run("x", 1.0, "nodes=2", ranks=16)
    jobs = [{"submitted": 1, "started": 61, "ended": 3661, "nodes": 2}, {"submitted": None}]
    run_dir.write_whole(run_dir.accounting_file(folder), json.dumps({"jobs": jobs}))
    start = {"event": "start", "time": 70.0, "step": 0, "seconds": {"start": 5.0}}
    ended = {"event": "end", "time": 3600.0, "step": 3, "seconds": {"compute": 3000.0}}
    text = "".join(json.dumps(line) + "\n" for line in (start, ended))
    run_dir.write_whole(run_dir.ledger_file(folder), text)
    assert sum(goodput(folder).values()) == pytest.approx(2 * 3660)
    rows = {row["what"]: row for row in record_of(here / "runs")}
    assert {"memory_gib", "step_seconds", "hours", "node_hours"} <= rows.keys()
    predicted = run_dir.predicted(folder)["node_hours"]
    assert rows["node_hours"]["worst_error"] == pytest.approx(predicted / 2.0 - 1)


def test_a_run_on_other_ranks_than_submitted_is_not_compared(here):
    folder = write_run("x", 1.0, ranks=4)
    assert {one.measured for one in outcomes(folder, {})} == {None}


def test_the_queue_is_known_from_accounting_alone(here):
    folder = write_run("x", 1.0, "nodes=2", ranks=16)
    waited = {
        one.name: one.measured for one in outcomes(folder, {"queue": 60.0, "compute": 7200.0})
    }
    assert waited["queue_seconds"] == 30.0 and waited["node_hours"] == 2.0
    assert "queue_seconds" not in {one.name for one in outcomes(folder, {})}


def test_a_folder_without_predictions_says_so(here):
    with pytest.raises(UserError, match="both a prediction and steps"):
        record_of(here)


@pytest.mark.parametrize(("first_step", "measured"), [(1, 0.1), (2, None)])
def test_energy_of_a_part_of_the_steps_is_not_that_of_the_run(here, first_step, measured):
    folder = write_run("x", 1.0)
    line = {"event": "energy", "first_step": first_step, "step": 3, "device_joules": 3.6e5}
    run_dir.append_record(run_dir.metrics_file(folder), line)
    [energy] = [one for one in outcomes(folder, {}) if one.name == "device_kwh"]
    assert energy.measured == measured
