"""What a run is expected to take, from its settings alone."""

import pytest

from atoll.config.compose import known_shape
from atoll.plan.memory import memory_of
from atoll.plan.prediction import QUANTITIES, in_a_line, predict, saving_seconds

LUMI = ("facility=lumi", "facility.account=x", "model=llama2_7b", "nodes=8", "precision=bf16")


def predicted(composed, *words):
    run = composed(*LUMI, *words).run
    return predict(run, known_shape(run)), run


def test_every_figure_where_the_rates_are_stated(composed):
    words = ("training.steps=1000", "facility.node.device_watts=280")
    prediction, run = predicted(composed, *words)
    seconds = prediction.step_seconds
    tokens = run.training.global_batch_samples * run.data.sequence_tokens
    assert prediction.tokens_per_second == tokens / seconds
    assert prediction.hours == 1000 * seconds / 3600
    assert prediction.node_hours == 8 * prediction.hours
    assert prediction.device_kwh == pytest.approx(0.28 * 64 * prediction.hours)
    line = in_a_line(prediction, run)
    assert line.startswith("at least ") and "node-hours, 1 job of up to" in line
    assert "GiB a device" in line and "kWh" in line and "?" not in line


def test_a_rate_that_is_not_stated_is_a_question_mark(composed):
    prediction, run = predicted(composed, "facility.node.link_gbps=null")
    assert prediction.step_seconds is prediction.hours is prediction.jobs is None
    line = in_a_line(prediction, run)
    assert line.startswith("time ? (lumi states no rate for: ")
    assert "checkpoints of 75.3 GiB" in line and "kWh" not in line


def test_steps_that_follow_from_the_text_have_no_total(composed):
    prediction, run = predicted(composed, "training.steps=null", "training.epochs=2")
    assert prediction.step_seconds and prediction.node_hours is None
    assert "time ? (training.epochs" in in_a_line(prediction, run)


def test_a_chain_has_as_many_jobs_as_its_walltime_needs(composed):
    words = ("facility.walltime_minutes=60", "training.steps=100000")
    prediction, run = predicted(composed, *words)
    usable = 3600 - run.restart.notice_seconds
    assert (prediction.jobs - 1) * usable < prediction.hours * 3600 <= prediction.jobs * usable
    assert f"{prediction.jobs} jobs of up to 1 h" in in_a_line(prediction, run)


def test_what_each_job_takes_to_start_is_no_time_for_steps(composed):
    words = ("facility.walltime_minutes=60", "training.steps=100000")
    prediction, run = predicted(composed, *words)
    half = {"start_seconds": (3600 - run.restart.notice_seconds) / 2}
    taught = predict(run, known_shape(run), calibration=half)
    assert taught.jobs in (2 * prediction.jobs - 1, 2 * prediction.jobs)


def test_a_checkpoint_holds_what_learns(composed):
    whole, run = predicted(composed)
    assert whole.checkpoint_gib * 2**30 == 12 * known_shape(run).parameters
    adapters, _ = predicted(composed, "sharding=ddp", "model.lora={rank: 8}")
    assert adapters.checkpoint_gib < whole.checkpoint_gib / 100
    assert predicted(composed, "optimizer=muon")[0].checkpoint_gib < whole.checkpoint_gib


def test_what_has_no_formula_is_unknown(composed):
    disk = "sharding.deepspeed.zero_optimization.offload_optimizer.nvme_path=/disk"
    prediction, run = predicted(composed, "sharding=deepspeed_zero3_nvme", disk)
    assert prediction.memory_gib is prediction.checkpoint_gib is prediction.step_seconds is None
    assert in_a_line(prediction, run).startswith("time ? (what DeepSpeed holds")
    assert "; ? GiB a device; 2 checkpoints of ? GiB" in in_a_line(prediction, run)


def test_a_record_names_units_rates_and_version(composed):
    prediction, run = predicted(composed)
    record = prediction.record(run, "0.1.0")
    assert record["atoll"] == "0.1.0" and record["rates"]["network_gbps"] == 800
    assert record["predicted"].keys() == QUANTITIES.keys()
    step = record["predicted"]["step_seconds"]
    assert step == {"value": prediction.step_seconds, "unit": "s", "bound": "at least"}


def test_on_processors_memory_is_that_of_the_whole_run(composed):
    words = ("model=llama_tiny", "precision=fp32", "training.steps=4", "checkpoint.every_steps=2")
    run = composed("facility=laptop", "data=python_stdlib", *words).run
    memory = memory_of(run, known_shape(run))
    assert predict(run, known_shape(run)).memory_gib == memory.whole_gib > memory.peak_gib


def test_saves_that_steps_do_not_hide_are_waited_for(composed):
    words = ("training.steps=100", "checkpoint.every_steps=10")
    run = composed(*LUMI, *words).run
    shape = known_shape(run)
    rate = 1e9 * 8  # one GB/s of each node
    save, export = 12 * shape.parameters / rate, 2 * shape.parameters / rate
    at_once = composed(*LUMI, *words, "checkpoint.asynchronous=false").run
    assert saving_seconds(at_once, shape, 1.0, 1.0) == pytest.approx(10 * save + export)
    assert save > 10.0  # ten steps of one second hide as much of nine saves
    assert saving_seconds(run, shape, 1.0, 1.0) == pytest.approx(10 * save - 90 + export)
    assert saving_seconds(run, shape, 60.0, 1.0) == pytest.approx(save + export)
    with_spares = composed(*LUMI, *words, "spare_nodes=2").run  # which write nothing
    assert saving_seconds(with_spares, shape, 60.0, 1.0) == pytest.approx(save + export)
    assert saving_seconds(run, shape, 1.0, None) is saving_seconds(run, shape, None, 1.0) is None
    apart = composed(*LUMI, *words, "sharding=ddp", "model.lora={rank: 8}", "export.merged=false")
    alone = saving_seconds(apart.run, known_shape(apart.run), 60.0, 1.0)
    assert alone < (save + export) / 100


def test_node_hours_hold_the_saves_where_it_is_known_how_fast_a_node_writes(composed):
    run = composed(*LUMI, "training.steps=1000").run
    plain, known = (predict(run, known_shape(run), file_write_gb_s=gb_s) for gb_s in (None, 2.0))
    assert known.hours == plain.hours and known.saving_seconds > 0
    saved_hours = (known.node_hours - plain.node_hours) / 8
    assert saved_hours == pytest.approx(known.saving_seconds / 3600)
    assert " to save" in in_a_line(known, run) and " to save" not in in_a_line(plain, run)
