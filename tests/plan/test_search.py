"""The layout of least time among thousands."""

from pathlib import Path
from typing import Any

import pytest
import small_run
import yaml

from atoll.config.compose import config_tree, known_shape, shardings
from atoll.plan.choose import Option, options
from atoll.plan.search import best_layout, layouts
from atoll.plan.seconds import stated_rates, step_seconds
from atoll.plan.shapes import shape_of
from atoll.settings import Run

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
TREE = {
    file.stem: yaml.safe_load(file.read_text().replace("${ranks_per_node}", "8"))
    for file in (Path(__file__).parents[2] / "hydra_conf" / "sharding").glob("*.yaml")
}


def run_of(device_memory_gib: float, nodes: int = 4, ranks: int = 8, **more: Any) -> Run:
    node: dict[str, Any] = {"devices": ranks, "device": "cuda"}
    node |= {"device_memory_gib": device_memory_gib}
    node |= {"memory_gib": 1000, "peak_tflops": 312, "device_memory_gb_s": 1500, "link_gbps": 2000}
    facility = {"name": "big", "scheduler": "slurm", "network": {"gbps": 400}, "node": node}
    return small_run.settings(
        Path("/nowhere"),
        ranks,
        nodes=nodes,
        facility=facility,
        launcher={"name": "static"},
        **{
            "data__sequence_tokens": 4096,
            "training__global_batch_samples": 256,
            "precision__compute": "bf16",
            "model__config": LLAMA,
            "sharding": TREE["full_shard"],
        }
        | more,
    )


def best(run: Run, *typed: str) -> Option:
    return best_layout(run, shape_of(LLAMA), TREE, None, typed)


def size_of(option: Option, name: str) -> int:
    words = [word for word in option.overrides if word.startswith(f"{name}=")]
    return int(words[0].partition("=")[2]) if words else 1


def test_thousands_of_layouts_are_tried_and_all_divide() -> None:
    every = list(layouts(run_of(64), shape_of(LLAMA), TREE))
    assert len(every) > 5000
    assert len({layout.words for layout in every}) == len(every)
    for layout in every:
        axes, training = layout.run.axes, layout.run.training
        assert axes.world == 32
        assert axes.tensor * axes.context <= 8
        assert training.global_batch_samples == 256
        assert training.global_batch_samples % (axes.data * training.microbatch_samples) == 0


def test_none_that_fits_is_faster() -> None:
    run = run_of(64)
    chosen = best(run)
    assert chosen.seconds.total is not None
    named = [o.seconds.total for o in options(run, shape_of(LLAMA), TREE) if o.fits]
    assert all(time is None or chosen.seconds.total <= 1.01 * time for time in named)


def test_recompute_is_a_price() -> None:
    wide, narrow = best(run_of(400)), best(run_of(24))
    assert wide.activation_checkpointing == "none"
    assert narrow.memory.peak_gib <= 0.92 * 24
    assert (narrow.seconds.compute or 0) >= (wide.seconds.compute or 0)


def test_a_typed_microbatch_stays() -> None:
    free, typed = best(run_of(64)), best(run_of(64), "training.microbatch_samples=2")
    assert not any(word.startswith("training.microbatch") for word in typed.overrides)
    assert (free.seconds.total or 0) <= 1.01 * (typed.seconds.total or 0)


def test_typed_axes_and_recompute_stay() -> None:
    run = run_of(64, training__activation_checkpointing="full")
    chosen = best(run, "sharding.tensor=2", "training.activation_checkpointing=full")
    assert size_of(chosen, "sharding.tensor") == 2
    assert chosen.activation_checkpointing == "full"


def test_fast_axes_leave_a_node_only_where_nothing_else_fits() -> None:
    long: dict[str, Any] = {"data__sequence_tokens": 131072}
    long |= {"training__global_batch_samples": 16}
    long |= {"training__microbatch_samples": 1, "nodes": 8, "ranks": 2}
    long |= {"model__config": LLAMA | {"max_position_embeddings": 131072}}
    inside, spread = best(run_of(64, **long)), best(run_of(30, **long))
    wide = size_of(spread, "sharding.tensor") * size_of(spread, "sharding.context")
    assert size_of(inside, "sharding.tensor") * size_of(inside, "sharding.context") <= 2 < wide


@pytest.mark.parametrize(
    ("facility", "experiment", "strategy"),
    [
        ("leonardo", "llama2_7b_it", "hybrid_shard_zero2"),
        ("karolina", "llama2_7b_cs", "hybrid_shard"),
    ],
)
@pytest.mark.parametrize("nodes", [4, 16])
def test_what_people_chose_in_2023_sends_more_between_nodes(
    composed: Any, facility: str, experiment: str, strategy: str, nodes: int
) -> None:
    """Copies of shards are averaged in fp32 twice round: 8 bytes a parameter leave each node.

    Gathered in bf16 and scattered in fp32 over all nodes it is 6, or 8 where it is gathered twice.
    """
    words = [f"facility={facility}", f"experiment={experiment}", f"nodes={nodes}"]
    run = composed(*words).run
    shape, tree = known_shape(run), shardings(config_tree())
    chosen = best_layout(run, shape, tree, None, words)
    theirs = composed(*words, f"sharding={strategy}").run
    step = step_seconds(theirs, shape, stated_rates(theirs))
    between = 2 * (nodes - 1) / nodes * 4 * shape.parameters
    assert step.sent["copies"] == pytest.approx(
        between / (run.facility.network.gbps * 1e9 / 8), rel=0.1
    )
    assert (chosen.seconds.total or 0) <= (step.total or 0)
