"""Runs that finished teach the next prediction; others teach nothing, and it can be forgotten."""

import json
import os

import pytest
import yaml

from atoll import run_dir
from atoll.cluster import before_queue, plan, submit
from atoll.cluster.learning import learn
from atoll.config import certificate
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.settings import dumped

LUMI = ["facility=lumi", "facility.account=x", "image=none", "precision=bf16", "training.steps=6"]


def finished(name, slower, *words, ranks=8, result=True, fault=False, age=0.0):
    """A run of five lines whose steps took so many times the least."""
    run = compose([*LUMI, f"name={name}", *words]).run
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    before_queue.keep_prediction(run)
    plain = before_queue.predict(run, before_queue.shape_known_here(run))
    figures = {"step_seconds": slower * (plain.step_seconds or 1.0), "tokens_per_second": 1.0}
    figures["memory_gib"] = 1.25 * plain.memory_gib
    lines = [{"event": "start", "ranks": ranks, "steps": 6}]
    lines += [{"event": "train", "step": step, **figures} for step in range(1, 6)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run_dir.write_whole(run_dir.metrics_file(folder), text)
    began = {"event": "start", "time": 100.0, "step": 0, "job": "", "seconds": {"start": 40.0}}
    run_dir.append_record(run_dir.ledger_file(folder), began)
    done = {"event": "end", "time": 160.0, "step": 6, "job": "", "seconds": {"start": 40.0}}
    run_dir.append_record(run_dir.ledger_file(folder), done)
    run_dir.write_whole(run_dir.held_file(folder), "began 1 50\nended 1 165.5\n")
    if fault:
        record = {"kind": "died", "blame": "node", "evidence": "it left", "time": 1.0}
        run_dir.append_record(run_dir.faults_file(folder), record)
    if result:
        file = run_dir.result_file(folder)
        run_dir.write_whole(file, "{}")
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    return run


def test_what_cannot_be_learned_queues_a_run_all_the_same(here, monkeypatch):
    """The clone may be somebody else's."""
    run = finished("a", 2.0)

    def refuses(*_):
        raise PermissionError(13, "Permission denied", "facilities/lumi.json")

    monkeypatch.setattr("atoll.cluster.learning.run_dir.add_to_certificate", refuses)
    with pytest.raises(PermissionError):
        learn(run)
    submit._predict_and_ask(run, False, True, {})


def test_a_prediction_is_that_of_the_runs_before_it(here):
    for name, slower in (("a", 2.0), ("b", 2.4), ("c", 9.0)):
        run = finished(name, slower)
    before = before_queue.prediction_of(run)
    assert before.runs == 0 and before.is_bound
    learn(run)
    after = before_queue.prediction_of(run)
    assert after.runs == 3 and not after.is_bound and after.start_seconds == 50.0
    assert after.end_seconds == 5.5
    assert after.step_seconds == pytest.approx(2.4 * before.step_seconds)
    # the plan counts as one run beside the three
    assert after.memory_gib == pytest.approx((1 + 3 * 1.25) / 4 * before.memory_gib)
    assert after.node_hours == pytest.approx((6 * after.step_seconds + 50 + 5.5) / 3600)
    line = before_queue.line(run)
    assert ": about " in line and "50 s of each job to start, 5.5 s behind its export" in line
    assert line.endswith("; from 3 runs here")
    before_queue.keep_prediction(run)
    kept = json.loads(run_dir.prediction_file(run_dir.folder(run)).read_text())
    assert kept["runs"] == 3 and kept["predicted"]["step_seconds"]["bound"] == ""
    # what was said with a factor is not taken for the plan without it
    finished("d", 2.4)
    learn(run)
    assert before_queue.prediction_of(run).step_seconds == pytest.approx(after.step_seconds)


def test_runs_that_did_not_end_well_teach_nothing(here):
    good = finished("good", 2.0)
    finished("unfinished", 9.0, result=False)
    finished("at-fault", 9.0, fault=True)
    finished("other-ranks", 9.0, ranks=4)
    finished("elsewhere", 9.0, "facility=generic_slurm")
    (here / "runs" / "broken").mkdir()
    (here / "runs" / "broken" / "result.json").write_text("{}")
    learn(good)
    assert before_queue.prediction_of(good).runs == 1


def test_nothing_is_read_again_where_no_run_has_finished_since(here):
    run = finished("a", 2.0)
    learn(run)
    file = run_dir.certificate(run)
    written = file.stat().st_mtime_ns
    learn(run)
    assert file.stat().st_mtime_ns == written


def test_what_was_learned_can_be_forgotten_for_good(here, capsys):
    run = finished("a", 2.0, age=10.0)
    with pytest.raises(UserError, match="nothing was learned"):
        plan.main([*LUMI, "--forget"])
    learn(run)
    assert plan.main([*LUMI, "--forget"]) == 0
    assert "forgotten" in capsys.readouterr().out
    learn(run)
    assert before_queue.prediction_of(run).runs == 0
    finished("b", 3.0, age=-10.0)
    learn(run)
    assert before_queue.prediction_of(run).runs == 1


def test_it_stands_beside_what_else_a_certificate_holds(here):
    run = finished("a", 2.0)
    run_dir.add_to_certificate(run, {"file_write_gb_s": 1.5})
    learn(run)
    assert certificate.read(run)["file_write_gb_s"] == 1.5
    assert "1.5 GB/s to files" in certificate.origin(run)


def test_a_certificate_of_runs_alone_leaves_the_figures_as_documented(here):
    run = finished("a", 2.0)
    learn(run)
    assert certificate.origin(run).startswith("as documented")
