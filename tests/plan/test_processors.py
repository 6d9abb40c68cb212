"""Seconds of a step on processors: each part from the rate that it should take."""

from pathlib import Path
from typing import Any

import pytest
import small_run
import tiny

from atoll.plan import processors
from atoll.plan.adapters import adapter_parameters, linear_layers
from atoll.plan.optimizer_work import orthogonal_flops
from atoll.plan.pipeline_parts import Part, parts_of
from atoll.plan.prediction import predict
from atoll.plan.seconds import STATED, Rates, explained, rates_of, step_seconds
from atoll.plan.shapes import Shape, shape_of
from atoll.plan.traffic import bytes_sent
from atoll.settings import Run

OWN = {
    "product_tflops_fp32": {"16": 0.1, "64": 0.3},
    "product_tflops_bf16": {"16": 0.2, "64": 0.2},
    "attention_tflops": {"32": 0.05},
    "memory_gb_s": 10.0,
    "optimizer_gb_s": 8.0,
    "optimizer_8bit_gb_s": 2.0,
    "logits_gb_s": 4.0,
    "blocks_per_us": 1e-3,
    "block_gb_s": 5.0,
}
HALF = {
    name: {size: rate / 2 for size, rate in each.items()} if isinstance(each, dict) else each / 2
    for name, each in OWN.items()
}
# that change nothing, in place of the usual ones
FACTORS = {name: float(name in ("compute", "memory", "sent")) for name in processors.USUAL}
LINK = {"latency_us": 100.0, "gb_s": 1.0}
RATES: dict[str, Any] = {
    "device": "cpu",
    "cores": 2,
    "ranks": 2,
    "alone": OWN,
    "together": HALF,
    "collectives": {"all_reduce": LINK, "all_gather": LINK, "reduce_scatter": LINK},
    "factors": FACTORS,
}


def run_of(ranks: int, sharding: str = "ddp", **changes: Any) -> Run:
    spread = small_run.sharding("single" if ranks == 1 else sharding)
    return small_run.settings(Path("/nowhere"), ranks, sharding=spread, **changes)


def compute_seconds(run: Run, shape: Shape, rates: dict[str, Any]) -> float:
    """Of a run without a pipeline."""
    [whole] = parts_of(run, shape)
    return processors.compute_seconds(run, shape, rates, whole)


def test_products_take_the_rate_of_their_width() -> None:
    run = run_of(1)
    shape = shape_of(run.model.config)
    tokens, head = 8 * 32, shape.head_parameters
    rate = processors._at(OWN["product_tflops_fp32"], min(shape.hidden, 64))
    blocks = 6 * tokens * (shape.multiplied_parameters - head) / (rate * 1e12)
    of_head = 6 * tokens * head / (rate * 1e12)
    attention = 12 * tokens * shape.layers * shape.query_width * 32 / 0.05e12
    found = compute_seconds(run, shape, RATES)
    assert found == pytest.approx(blocks + of_head + attention)
    assert processors._at({"16": 1.0, "64": 3.0}, 32) == pytest.approx(2.0)


def test_attention_alone_is_not_computed_again_where_its_results_are_kept() -> None:
    shape = shape_of(run_of(1).model.config)
    seconds = {
        again: compute_seconds(run_of(1, training__activation_checkpointing=again), shape, RATES)
        for again in ("none", "selective", "full")
    }
    attention = 4 * (8 * 32) * shape.layers * shape.query_width * 32 / 0.05e12
    assert seconds["full"] - seconds["selective"] == pytest.approx(attention)
    assert seconds["none"] < seconds["selective"]


def test_what_an_optimizer_does_beside_its_state() -> None:
    adamw = run_of(1)
    shape = shape_of(adamw.model.config)
    muon, averaging = run_of(1, optimizer__name="muon"), run_of(1, optimizer__ema_decay=0.9)
    assert processors.orthogonal_seconds(adamw, shape, RATES) == 0
    for slow, quick in (("bf16", "fp32"), ("fp32", "bf16")):  # where there is no bf16, and where
        own = OWN | {f"product_tflops_{slow}": {"16": 0.01}, f"product_tflops_{quick}": {"16": 0.5}}
        more = processors.orthogonal_seconds(muon, shape, RATES | {"alone": own})
        assert more == pytest.approx(orthogonal_flops(muon, shape) / 0.5e12)
    more = processors.state_seconds(averaging, shape, RATES) - processors.state_seconds(
        adamw, shape, RATES
    )
    assert more == pytest.approx(12 * shape.parameters / 10e9)


def test_an_8_bit_step_takes_its_own_rate_and_has_no_time_where_there_is_none() -> None:
    eight = run_of(1, optimizer__name="adamw_8bit")
    shape = shape_of(eight.model.config)
    more = processors.state_seconds(eight, shape, RATES) - processors.state_seconds(
        run_of(1), shape, RATES
    )
    assert more == pytest.approx(28 * shape.parameters * (1 / 2e9 - 1 / 8e9))
    older = {name: rate for name, rate in OWN.items() if name != "optimizer_8bit_gb_s"}
    plan = predict(eight, shape, RATES | {"alone": older, "together": older})
    assert plan.step_seconds is None and plan.memory_gib is not None
    assert "not measured the step of adamw_8bit" in plan.why_no_time


def test_adapters_have_products_of_their_own_and_move_numbers_around_them() -> None:
    lora = {"rank": 4, "targets": "all-linear"}
    four, eight = (run_of(1, model__lora=lora | {"rank": rank}) for rank in (4, 8))
    shape = shape_of(four.model.config)
    more = compute_seconds(eight, shape, RATES) - compute_seconds(four, shape, RATES)
    tokens, parameters = 8 * 32, adapter_parameters(four, shape)
    assert more == pytest.approx(6 * tokens * parameters / 0.1e12)  # at the narrowest rate
    [whole] = parts_of(four, shape)
    faster = RATES | {"alone": OWN | {"memory_gb_s": 20.0}}
    slow, quick = (
        processors.moving_seconds(four, shape, rates, whole) for rates in (RATES, faster)
    )
    numbers = sum(8 * each.outputs + 3 * each.inputs for each in linear_layers(shape))
    moved = 4 * tokens * shape.layers * numbers
    assert slow - quick == pytest.approx(moved / 10e9 - moved / 20e9)


def test_all_wait_for_the_stage_of_a_pipeline_that_has_the_head() -> None:
    run = run_of(2, "full_shard", sharding__pipeline=2)
    shape = shape_of(run.model.config)
    rate = processors._at(HALF["product_tflops_fp32"], 32) * 1e12  # loss_chunk_tokens of a sample
    head = 6 * (8 * 32 / 2) * shape.head_parameters / rate
    even = compute_seconds(run_of(2, "full_shard"), shape, RATES)
    step = step_seconds(run, shape, rates_of(run, RATES))
    assert step.compute == pytest.approx(even + head)
    shared = RATES | {"cores": 1}  # the core of the stage that waits goes to the other
    half = step_seconds(run, shape, rates_of(run, shared))
    assert half.compute == pytest.approx(even + head / 2)
    # the other stage has none: a first microbatch takes it less time than the last stage
    _, moved = processors_passes(run, shape, parts_of(run, shape)[0])
    assert step.bubble == pytest.approx((even - head + moved) / run.microbatches)


def processors_passes(run: Run, shape: Shape, part: Part) -> tuple[float, float]:
    return (
        processors.compute_seconds(run, shape, RATES, part),
        processors.moving_seconds(run, shape, RATES, part),
    )


def test_nobody_waits_for_the_optimizers_of_other_stages() -> None:
    run = run_of(2, "full_shard", sharding__pipeline=2)
    shape = shape_of(run.model.config)
    slower = {way: RATES[way] | {"optimizer_gb_s": 0.01} for way in ("alone", "together")}
    quick, slow = (
        step_seconds(run, shape, rates_of(run, RATES | changed)) for changed in ({}, slower)
    )
    assert (slow.memory or 0.0) > 5 * (quick.memory or 0.0)
    assert slow.bubble == quick.bubble
    stated = Rates(1e3, 1e3, 1e3, 1e3)
    muon = run_of(2, "full_shard", sharding__pipeline=2, optimizer__name="muon")
    adamw, less = (step_seconds(each, shape, stated) for each in (run, muon))
    assert (less.memory or 0.0) < (adamw.memory or 0.0)  # a matrix has one moment there
    assert less.bubble == adamw.bubble


def test_the_busiest_of_ranks_that_divide_experts_has_more() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    config = tiny.CONFIGS["llama"] | {"vocab_size": 300} | experts
    mixture = {"name": "mixtral", "config": config}
    sharded = run_of(2, "full_shard", model=mixture)
    divided = run_of(2, "full_shard", model=mixture, sharding__expert=2)
    shape = shape_of(config)
    [whole] = parts_of(divided, shape)
    assert processors.divided_seconds(sharded, shape, RATES, whole) == 0
    active = shape.layers * shape.expert_parameters * shape.active_experts / shape.experts
    rate = processors._at(HALF["product_tflops_fp32"], shape.hidden) * 1e12
    seconds = processors.divided_seconds(divided, shape, RATES, whole)
    assert seconds == pytest.approx(6 * (8 * 32 / 2) * active / rate)
    even, uneven = (
        compute_seconds(divided, shape, RATES | {"factors": FACTORS | {"uneven_experts": part}})
        for part in (0.0, 0.2)
    )
    assert uneven - even == pytest.approx(0.2 * seconds)


def test_deepspeed_has_no_time_on_processors() -> None:
    run = run_of(2, "deepspeed_zero1")
    shape = shape_of(run.model.config)
    plan = predict(run, shape, RATES)
    assert plan.step_seconds is None and plan.memory_gib is not None
    assert "DeepSpeed's engine" in plan.why_no_time
    assert "DeepSpeed's engine" in explained(step_seconds(run, shape, rates_of(run, RATES)))[1]
    assert predict(run_of(2), shape, RATES).step_seconds is not None


def test_ranks_beyond_the_cores_take_turns() -> None:
    shape = shape_of(run_of(1).model.config)
    two, four = (compute_seconds(run_of(n), shape, RATES) for n in (2, 4))
    one = compute_seconds(run_of(1), shape, RATES)
    # half of the tokens at half of the rate, then a quarter at a quarter of it
    assert two == pytest.approx(one)
    assert four == pytest.approx(one)


def test_latency_and_bytes_of_what_is_sent() -> None:
    run = run_of(2)
    shape = shape_of(run.model.config)
    step = step_seconds(run, shape, rates_of(run, RATES))
    size = bytes_sent(run, shape)["gradients"]
    assert size is not None
    # one bucket, there and back
    assert step.sent["gradients"] == pytest.approx(2 * 100e-6 + size / 1e9)
    assert step.hidden == 0.0
    parts = (step.compute, step.memory, step.sent["gradients"])
    assert step.total == pytest.approx(sum(part or 0.0 for part in parts))


def test_fitted_factors_weigh_the_parts() -> None:
    run = run_of(1)
    shape = shape_of(run.model.config)
    changed = {"compute": 2.0, "memory": 0.0, "step_seconds": 0.5, "block_seconds": 0.001}
    factors = FACTORS | changed
    plain, fitted = (
        step_seconds(run, shape, rates_of(run, rates))
        for rates in (RATES, RATES | {"factors": factors})
    )
    assert fitted.compute == pytest.approx(2 * (plain.compute or 0.0))
    blocks = run.microbatches * shape.layers
    assert fitted.memory == pytest.approx(0.5 + 0.001 * blocks)


def test_without_fitted_factors_the_usual_ones_weigh() -> None:
    run = run_of(1)
    shape = shape_of(run.model.config)
    bare = {name: value for name, value in RATES.items() if name != "factors"}
    usual, same = (
        step_seconds(run, shape, rates_of(run, rates)).total
        for rates in (bare, bare | {"factors": processors.USUAL})
    )
    plain = step_seconds(run, shape, rates_of(run, RATES)).total
    assert usual == same and usual is not None and plain is not None and usual > 1.02 * plain


def test_a_block_is_passed_again_where_it_is_recomputed_and_by_one_stage() -> None:
    plain, again = (run_of(1, training__activation_checkpointing=way) for way in ("none", "full"))
    staged = run_of(2, "full_shard", sharding__pipeline=2)
    shape = shape_of(plain.model.config)
    once, more, stage = (
        processors.block_passes(run, parts_of(run, shape)[0]) / run.microbatches
        for run in (plain, again, staged)
    )
    assert once == shape.layers and stage == shape.layers / 2
    assert once < more < 2 * once


def test_rates_of_another_kind_of_device_are_not_taken() -> None:
    run = run_of(2)
    assert rates_of(run, RATES | {"device": "cuda"}).on_processors is None
    assert rates_of(run, None).on_processors is None


def test_devices_take_what_was_measured_before_what_is_stated() -> None:
    node = {"devices": 2, "device": "cuda", "peak_tflops": 989, "device_memory_gb_s": 3350}
    facility = {"name": "here", "scheduler": "none", "node": node | {"link_gbps": 3600}}
    run = run_of(2, facility=facility, precision__compute="bf16")
    found = rates_of(run, RATES | {"device": "cuda"})
    assert (found.device_tflops, found.memory_gb_s) == (0.1, 5.0)
    assert (found.link_gbps, found.link_latency_us) == (8.0, 100.0)


def test_links_of_devices_are_those_that_a_doctors_job_measured() -> None:
    node = {"devices": 2, "device": "cuda", "peak_tflops": 989, "device_memory_gb_s": 3350}
    network = {"gbps": 400, "latency_us": 14}
    facility = {"name": "here", "scheduler": "slurm", "node": node | {"link_gbps": 3600}}
    run = run_of(2, facility=facility | {"network": network}, precision__compute="bf16")
    links = {"bandwidth_in_node_gb_s": 200.0, "bandwidth_between_nodes_gb_s": 20.0}
    found = rates_of(run, {"links": links})
    assert (found.link_gbps, found.network_gbps) == (1600, 320)  # two ranks of a node, 160 each
    assert (found.device_tflops, found.network_latency_us) == (989, 14)
    fast = rates_of(run, {"links": {"bandwidth_between_nodes_gb_s": 50.0}})
    assert (fast.link_gbps, fast.network_gbps) == (3600, 400)  # no more than all its cards
    both = rates_of(run, RATES | {"device": "cuda", "links": links})
    assert (both.link_gbps, both.network_gbps) == (8.0, 320)
    assert rates_of(run_of(2), {"links": links}).source == STATED
