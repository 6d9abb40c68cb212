"""What an optimizer keeps, and what it gathers."""

from pathlib import Path

import pytest
import small_run
from transformers import AutoConfig

from atoll.plan.memory import memory_of
from atoll.plan.shapes import shape_of
from atoll.plan.traffic import bytes_sent

LLAMA = {"model_type": "llama"}  # 2 7B, as transformers has it by default


def test_muon_keeps_one_moment_of_a_matrix_and_gathers_it() -> None:
    shape, sharding = shape_of(LLAMA), small_run.sharding("full_shard")
    adamw, muon = (
        small_run.settings(Path("/x"), 4, sharding=sharding, optimizer__name=name)
        for name in ("adamw", "muon")
    )
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    saved = memory_of(adamw, shape).optimizer - memory_of(muon, shape).optimizer
    assert saved == pytest.approx(4 * matrices / 4)
    sent = [bytes_sent(run, shape)["parameters"] for run in (adamw, muon)]
    assert sent[1] - sent[0] == pytest.approx(3 / 4 * 2 * matrices)


def test_muon_keeps_one_moment_of_experts_and_gathers_divided_ones() -> None:
    shape = shape_of(AutoConfig.for_model("mixtral").to_dict())  # 8x7B
    experts, sent = 32 * 8 * 3 * 4096 * 14336, []
    for ranks in (1, 2):
        sharding = small_run.sharding("full_shard") | {"expert": ranks}
        adamw, muon = (
            small_run.settings(Path("/x"), 4, sharding=sharding, optimizer__name=name)
            for name in ("adamw", "muon")
        )
        matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096)
        saved = memory_of(adamw, shape).optimizer - memory_of(muon, shape).optimizer
        assert saved == pytest.approx(4 * (matrices + experts) / 4)
        more = [bytes_sent(run, shape)["parameters"] for run in (adamw, muon)]
        sent.append(more[1] - more[0])
    # of a rank's half, the other rank with the same experts has one half
    assert sent[1] - sent[0] == pytest.approx(2 * experts / 2 / 2)
