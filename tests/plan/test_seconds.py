"""Seconds of a step against closed forms, and what is chosen by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_run
import yaml

from atoll.plan.adapters import adapter_parameters
from atoll.plan.choose import choose, options
from atoll.plan.seconds import Rates, explained, step_seconds
from atoll.plan.shapes import shape_of
from atoll.plan.traffic import bytes_sent
from atoll.settings import Lora, Run

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
SHARDINGS = Path(__file__).parents[2] / "hydra_conf" / "sharding"
IDEAL = Rates(312.0, 1e15, 1e15, 1e15)
FIGURES = {"peak_tflops": 312, "device_memory_gb_s": 1500, "link_gbps": 2000}


def run_of(nodes: int, sharding: str, device_memory_gib: float = 64, **node: Any) -> Run:
    text = (SHARDINGS / f"{sharding}.yaml").read_text().replace("${ranks_per_node}", "8")
    hardware = {"devices": 8, "device": "cuda", "device_memory_gib": device_memory_gib}
    facility = {"name": "big", "scheduler": "slurm", "network": {"gbps": 400}}
    return small_run.settings(
        Path("/nowhere"),
        8,
        nodes=nodes,
        facility=facility | {"node": hardware | {"memory_gib": 1000} | node},
        launcher={"name": "static"},
        data__sequence_tokens=4096,
        training__global_batch_samples=64,
        precision__compute="bf16",
        model__config=LLAMA,
        sharding=yaml.safe_load(text),
    )


def test_ideal_links_leave_matrix_products_alone() -> None:
    run, shape = run_of(2, "full_shard"), shape_of(LLAMA)
    attention = 12 * shape.layers * shape.query_width * 4096
    flops = 64 * 4096 / 16 * (6 * shape.multiplied_parameters + attention)
    step = step_seconds(run, shape, IDEAL)
    assert step.total == pytest.approx(flops / 312e12)
    assert step.bound == "compute"


@pytest.mark.parametrize(
    ("again", "over_weights", "over_attention"), [("selective", 4, 3), ("full", 4, 4)]
)
def test_what_is_computed_again_is_counted(
    again: str, over_weights: int, over_attention: int
) -> None:
    run, shape = run_of(2, "full_shard"), shape_of(LLAMA)
    training = run.training.model_copy(update={"activation_checkpointing": again})
    step = step_seconds(run.model_copy(update={"training": training}), shape, IDEAL)
    attention = 4 * shape.layers * shape.query_width * 4096
    blocks = shape.multiplied_parameters - shape.head_parameters
    passes = over_weights * 2 * blocks + 3 * 2 * shape.head_parameters + over_attention * attention
    assert step.total == pytest.approx(64 * 4096 / 16 * passes / 312e12)


def test_weights_that_stay_have_no_gradients() -> None:
    run, shape = run_of(2, "full_shard"), shape_of(LLAMA)
    lora = run.model.model_copy(update={"lora": Lora(rank=8, alpha=16)})
    beside = run.model_copy(update={"model": lora})
    step = step_seconds(beside, shape, IDEAL)
    attention = 12 * shape.layers * shape.query_width * 4096
    learning = 6 * adapter_parameters(beside, shape)
    flops = 64 * 4096 / 16 * (4 * shape.multiplied_parameters + attention + learning)
    assert step.total == pytest.approx(flops / 312e12)
    slow = replace(IDEAL, memory_gb_s=1.0)
    moved = step_seconds(beside, shape, slow).memory, step_seconds(run, shape, slow).memory
    assert moved[0] < moved[1]  # moments and gradients are those of the adapters


def test_muon_computes_beside_the_batch() -> None:
    """For Llama 2 7B as much as a batch of 16k tokens a device; answers' logits come twice."""
    run, shape = run_of(2, "full_shard"), shape_of(LLAMA)
    optimizer = run.optimizer.model_copy(update={"name": "muon"})
    muon = run.model_copy(update={"optimizer": optimizer})
    more = step_seconds(muon, shape, IDEAL).total - step_seconds(run, shape, IDEAL).total
    square, wide = 5 * 6 * 4096**3, 5 * (4 * 4096**2 * 11008 + 2 * 4096**3)
    assert more == pytest.approx(32 * (4 * square + 3 * wide) / 312e12)
    pairs = run.model_copy(update={"task": run.task.model_copy(update={"name": "preference"})})
    more = step_seconds(pairs, shape, IDEAL).total - step_seconds(run, shape, IDEAL).total
    assert more == pytest.approx(64 * 4096 / 16 * 2 * shape.head_parameters / 312e12)


def test_each_group_takes_its_own_link() -> None:
    shape = shape_of(LLAMA)
    step = step_seconds(run_of(4, "hybrid_shard"), shape, Rates(312.0, 1500.0, 2000.0, 400.0))
    sent = bytes_sent(run_of(4, "hybrid_shard"), shape)
    assert step.sent["parameters"] == pytest.approx((sent["parameters"] or 0) * 8 / 2000e9)
    # a shard's copies: eight rings side by side share their node's network
    copies = 2 * 3 / 4 * 4 * shape.parameters / 8
    assert step.sent["copies"] == pytest.approx(copies * 8 / (400e9 / 8))


def test_what_has_no_figure_is_unknown() -> None:
    step = step_seconds(run_of(2, "full_shard"), shape_of(LLAMA), Rates(312.0, 1500.0, 1e3, None))
    assert step.total is None
    assert step.unknown == ["parameters", "gradients"]


def test_time_chooses_where_figures_are_stated() -> None:
    tree = {
        file.stem: yaml.safe_load(file.read_text().replace("${ranks_per_node}", "8"))
        for file in SHARDINGS.glob("*.yaml")
    }
    rows = list(options(run_of(4, "full_shard", **FIGURES), shape_of(LLAMA), tree))
    best = choose(rows).seconds.total
    assert best is not None
    assert choose(rows).memory.host == 0
    kept = [row.seconds.total for row in rows if row.fits and not row.memory.host]
    assert best == min(time for time in kept if time is not None)


def test_explained_names_the_bound_and_each_link() -> None:
    shape = shape_of(LLAMA)
    slow = explained(step_seconds(run_of(4, "hybrid_shard"), shape, Rates(312, 1500, 2000, 0.4)))
    assert slow[0].startswith("bound by: link")
    assert "(inside nodes)" in slow[2]
    assert "copies" in slow[2] and "(between nodes)" in slow[2]
    ideal = explained(step_seconds(run_of(2, "full_shard"), shape, IDEAL))
    assert ideal[0].startswith("bound by: compute")
    unknown = explained(step_seconds(run_of(2, "full_shard"), shape, Rates(312, 1500, None, None)))
    assert unknown[0] == "bound by: unknown"
    assert "parameters, gradients" in unknown[1]


def test_bytes_choose_where_a_rate_is_missing() -> None:
    tree = {
        file.stem: yaml.safe_load(file.read_text().replace("${ranks_per_node}", "8"))
        for file in SHARDINGS.glob("*.yaml")
    }
    partly = FIGURES | {"link_gbps": None}  # some strategies send between nodes alone
    rows = list(options(run_of(4, "full_shard", **partly), shape_of(LLAMA), tree))
    none = FIGURES | {"link_gbps": None, "peak_tflops": None}
    by_bytes = list(options(run_of(4, "full_shard", **none), shape_of(LLAMA), tree))
    assert choose(rows).overrides == choose(by_bytes).overrides
