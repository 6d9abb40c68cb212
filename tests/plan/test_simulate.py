"""Scaling over nodes against cases whose answer is known in closed form."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_run

from atoll.config.compose import config_tree, known_shape, shardings
from atoll.errors import UserError
from atoll.plan.checkpoint_interval import useful_share
from atoll.plan.search import best_layout
from atoll.plan.seconds import Rates, StepSeconds, step_seconds
from atoll.plan.shapes import shape_of
from atoll.plan.simulate import NO_BATCH, UNEVEN, Price, chosen_price, knee, simulated
from atoll.settings import Run

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
SHAPE = shape_of(LLAMA)
IDEAL = Rates(312.0, 1e15, 1e15, 1e15)


def run_of(nodes: int = 1, **changes: Any) -> Run:
    hardware = {"devices": 8, "device": "cuda", "device_memory_gib": 64, "memory_gib": 1000}
    return small_run.settings(
        Path("/nowhere"),
        8,
        nodes=nodes,
        facility={"name": "big", "scheduler": "slurm", "node": hardware},
        launcher={"name": "static"},
        data__sequence_tokens=4096,
        precision__compute="bf16",
        model__config=LLAMA,
        **{"training__global_batch_samples": 64, "training__microbatch_samples": 1} | changes,
    )


def priced(rates: Rates) -> Price:
    def price(run: Run) -> tuple[StepSeconds, tuple[str, ...]]:
        return step_seconds(run, SHAPE, rates), ()

    return price


def test_ideal_links_lose_nothing_until_the_batch_is_used_up() -> None:
    rows = simulated(run_of(), [1, 2, 4, 8, 16, 32], False, priced(IDEAL), None)
    assert [row.efficiency for row in rows[:4]] == [pytest.approx(1.0, rel=1e-6)] * 4
    # 64 samples are enough for 64 ranks: eight nodes
    assert [row.bound for row in rows[4:]] == [NO_BATCH] * 2
    assert [row.efficiency for row in rows[4:]] == [pytest.approx(0.5), pytest.approx(0.25)]
    bent = knee(rows)
    assert bent is not None and bent.nodes == 16
    weak = simulated(run_of(), [1, 8, 64], True, priced(IDEAL), None)
    assert [row.batch_samples for row in weak] == [64, 512, 4096]
    assert knee(weak) is None


def test_latency_alone_is_the_sum_of_its_messages() -> None:
    run = run_of(nodes=4)
    free = Rates(1e15, 1e15, 1e15, 1e15)
    step = step_seconds(run, SHAPE, replace(free, link_latency_us=1.0, network_latency_us=9.0))
    # two gathers of each of 32 blocks and one of the rest in each of two passes, to 31 others;
    # a ring of eight ranks a node: each eighth message leaves it
    each = 31 * (9.0 + 7 * 1.0) / 8 / 1e6
    assert step.sent["parameters"] == pytest.approx(2 * (2 * 32 + 1) * each, rel=1e-4)
    assert step.sent["gradients"] == pytest.approx(33 * each, rel=1e-4)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_bubble_is_that_of_its_stages(stages: int) -> None:
    changes = {"sharding__pipeline": stages, "training__global_batch_samples": 64}
    run = run_of(**changes)
    step = step_seconds(run, SHAPE, IDEAL)
    assert step.compute is not None
    tokens = 64 * run.data.sequence_tokens * stages / run.world_size
    head = (stages > 1) * 6 * tokens * SHAPE.head_parameters / (IDEAL.device_tflops or 1) / 1e12
    expected = (step.compute - head) * (stages - 1) / run.microbatches  # the others have none
    assert step.bubble == pytest.approx(expected, abs=1e-6)


def test_failures_take_what_daly_says() -> None:
    # exponential failures: M e^(R/M) (e^((t+d)/M) - 1) for each t that lasts
    expected = 1000 / (20_000 * math.exp(300 / 20_000) * (math.exp(1050 / 20_000) - 1))
    assert useful_share(1000, 50, 20_000, 300) == pytest.approx(expected)
    assert useful_share(1000, 50, 1, 300) == 0.0
    rows = simulated(run_of(), [1, 8], True, priced(IDEAL), 100.0)
    assert rows[0].useful is not None and rows[1].useful is not None
    assert 1 > rows[0].useful > rows[1].useful > 0.9


def test_a_rate_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match="states no rate for: parameters, gradients"):
        simulated(run_of(), [1, 2], True, priced(Rates(312.0, 1500.0, None, None)), None)


def test_a_count_that_does_not_divide_the_batch_is_no_knee() -> None:
    rows = simulated(run_of(), [1, 2, 3, 4], False, priced(IDEAL), None)
    assert [row.busy_nodes for row in rows] == [1, 2, 2, 4]  # 64 samples on 24 ranks
    assert (rows[2].bound, rows[2].efficiency) == (UNEVEN, pytest.approx(2 / 3, rel=1e-6))
    assert knee(rows) is None
    few = simulated(run_of(), [1, 12], False, priced(IDEAL), None)[1]
    assert (few.busy_nodes, few.bound) == (8, NO_BATCH)


def test_the_knee_is_put_down_to_what_grew_and_not_to_what_is_longest() -> None:
    slow = replace(IDEAL, network_latency_us=1000.0)
    rows = simulated(run_of(), [1, 2, 4, 8], False, priced(slow), None)
    bent = knee(rows)
    assert bent is not None and bent.bound == "compute" and bent.cause == "link"


def test_a_count_takes_the_layout_that_the_search_finds(composed):
    words = ("facility=lumi", "facility.account=x", "model=llama2_7b", "nodes=16", "precision=bf16")
    run = composed(*words, "training.global_batch_samples=2048").run
    shape, tree = known_shape(run), shardings(config_tree())
    best = best_layout(run, shape, tree)
    step, taken = chosen_price(shape, tree)(run)
    assert (step.total, taken) == (best.seconds.total, best.overrides)
    assert any(word.startswith("training.microbatch_samples=") for word in taken)
    typed = [f"training.microbatch_samples={run.training.microbatch_samples}"]
    _, kept = chosen_price(shape, tree, typed=typed)(run)
    assert not any(word.startswith("training.microbatch_samples=") for word in kept)
