"""What Muon computes in a step, against what torch counts of it."""

from pathlib import Path
from typing import Any

import families
import pytest
import small_run
import tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.plan.optimizer_work import orthogonal_flops
from atoll.plan.shapes import shape_of
from atoll.settings import Run
from atoll.train.muon import orthogonal


def run_of(ranks: int = 1, sharding: str = "single", **changes: Any) -> Run:
    spread = small_run.sharding(sharding)
    return small_run.settings(Path("/x"), ranks, sharding=spread, optimizer__name="muon", **changes)


@pytest.mark.parametrize("family", ["llama2", "llama3", "mixtral", "phi3", "gpt_neox", "gpt2"])
def test_as_many_operations_as_torch_counts(family: str) -> None:
    sizes = tiny.CONFIGS["gpt2"] if family == "gpt2" else families.config_of(family)
    config = AutoConfig.for_model(**sizes)
    model = AutoModelForCausalLM.from_config(config)
    matrices = [
        parameter.detach()
        for name, parameter in model.named_parameters()
        # a router's product is too small to be counted
        if parameter.ndim > 1
        and (".layers." in name or ".h." in name)
        and ".gate.weight" not in name
    ]
    with FlopCounterMode(display=False) as counter:
        for matrix in matrices:
            orthogonal(matrix)
    found = orthogonal_flops(run_of(), shape_of(config.to_dict()))
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_each_rank_takes_all_matrices_but_a_part_of_whole_experts() -> None:
    llama = shape_of({"model_type": "llama"})
    alone = orthogonal_flops(run_of(), llama)
    assert orthogonal_flops(run_of(4, "full_shard"), llama) == alone
    by_stage = run_of(2, sharding="pipeline")
    assert orthogonal_flops(by_stage, llama) == alone / 2
    mixtral = shape_of(AutoConfig.for_model("mixtral").to_dict())  # of 8 experts
    whole, divided = (orthogonal_flops(run, mixtral) for run in (run_of(), run_of(4, "full_shard")))
    low, high = 4096, 14336
    expert = 5 * (4 * low**2 * 3 * high + 2 * 2 * low**3)
    assert whole - divided == pytest.approx(32 * 6 * expert)


def test_none_for_adamw_and_adapters() -> None:
    shape = shape_of({"model_type": "llama"})
    adamw = small_run.settings(Path("/x"), 1)
    assert orthogonal_flops(adamw, shape) == 0


def test_beside_an_expert_axis_a_rank_has_whole_experts() -> None:
    mixtral = shape_of(AutoConfig.for_model("mixtral").to_dict())
    spread = small_run.sharding("full_shard") | {"expert": 2}
    run = small_run.settings(Path("/x"), 4, sharding=spread, optimizer__name="muon")
    expert = 5 * (4 * 4096**2 * 3 * 14336 + 2 * 2 * 4096**3)
    more = orthogonal_flops(run_of(), mixtral) - orthogonal_flops(run, mixtral)
    assert more == pytest.approx(32 * 4 * expert), "four of eight, not one"
