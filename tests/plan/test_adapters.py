"""Adapters: what learns is little, and what stays may be stored in few bits."""

from pathlib import Path
from typing import Any

import pytest
import small_run

from atoll.errors import UserError
from atoll.plan.adapters import adapter_parameters
from atoll.plan.choose import choose, options
from atoll.plan.memory import memory_of
from atoll.plan.shapes import shape_of
from atoll.plan.traffic import bytes_sent, total
from atoll.settings import Run

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
TREE: dict[str, Any] = {
    "single": {"name": "single", "layouts": []},
    "ddp": {"name": "ddp", "layouts": ["ddp"]},
    "full_shard": {"name": "full_shard", "layouts": ["fsdp"], "shard": "all"},
}


def run_of(
    ranks: int = 1, quantisation: str = "nf4", device_memory_gib: float = 64, **more: Any
) -> Run:
    node: dict[str, Any] = {
        "devices": ranks,
        "device": "cuda",
        "device_memory_gib": device_memory_gib,
    }
    node["memory_gib"] = 500
    model = {"config": LLAMA, "lora": {"rank": 16}, "quantisation": quantisation, "name": "x"}
    return small_run.settings(
        Path("/nowhere"),
        ranks,
        facility={"name": "big", "scheduler": "slurm", "node": node},
        launcher={"name": "static"},
        training__global_batch_samples=16,
        precision__compute="bf16",
        **({"model": model, "sharding": TREE["single"], "data__sequence_tokens": 1024} | more),
    )


def test_qlora_of_7b_is_chosen_for_one_device_of_64_gib() -> None:
    run = run_of()
    best = choose(list(options(run, shape_of(LLAMA), TREE)))
    assert best.overrides == ("sharding=single",)
    assert best.memory.peak_gib < 40
    learning = adapter_parameters(run, shape_of(LLAMA))
    # 32 blocks: four square matrices of 4096, three between 4096 and 11008
    assert learning == 32 * 16 * (4 * 8192 + 3 * (4096 + 11008))
    assert best.memory.gradients == learning * 4
    assert best.memory.optimizer == learning * 8


@pytest.mark.parametrize(("stored", "gib"), [("nf4", 4.24), ("int8", 7.17), ("none", 25.26)])
def test_what_stays_takes_its_bits(stored: str, gib: float) -> None:
    memory = memory_of(run_of(quantisation=stored), shape_of(LLAMA))
    assert memory.parameters / 2**30 == pytest.approx(gib, rel=0.01)


def test_what_stays_sends_no_gradients() -> None:
    shape = shape_of(LLAMA)
    run = run_of(4, "none", sharding=TREE["ddp"])
    expected = 2 * 3 / 4 * 4 * adapter_parameters(run, shape)
    assert total(bytes_sent(run, shape)) == pytest.approx(expected)
    sharded = run_of(4, "none", sharding=TREE["full_shard"])
    sent = bytes_sent(sharded, shape)
    assert sent["gradients"] == pytest.approx(expected / 2)
    assert memory_of(sharded, shape).parameters < memory_of(run, shape).parameters / 3


def test_sharded_4_bit_weights_travel_and_stay_as_their_bytes() -> None:
    shape = shape_of(LLAMA)
    runs = {n: run_of(n, "nf4", sharding=TREE["full_shard"]) for n in (1, 4)}
    one, four = (memory_of(run, shape).parameters for run in runs.values())
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = 2 * 32000 * 4096 + 65 * 4096 + adapter_parameters(runs[4], shape)
    assert one - four == pytest.approx(3 / 4 * (linear / 2 + 4 * rest))
    sent = bytes_sent(runs[4], shape)["parameters"]
    learning = adapter_parameters(runs[4], shape) + 64 * 4096
    outside = 2 * 32000 * 4096 + 4096
    assert sent / runs[4].microbatches == pytest.approx(
        3 / 4 * (2 * (linear / 2 + 2 * learning) + 2 * outside)
    )


def test_targets_that_no_table_names_are_unknown_and_never_chosen() -> None:
    model = {"config": LLAMA, "lora": {"targets": ["whatever"]}, "name": "x"}
    found = list(options(run_of(model=model), shape_of(LLAMA), TREE))
    assert {option.fits for option in found} == {None}


def test_a_quantised_model_that_does_not_fit_is_still_refused() -> None:
    with pytest.raises(UserError, match="no strategy fits"):
        choose(list(options(run_of(device_memory_gib=5), shape_of(LLAMA), TREE)))
