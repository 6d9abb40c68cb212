"""What a run tells DeepSpeed is what DeepSpeed reads; what it cannot do is said at the start."""

import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composing import composed, here, tree

from atoll.errors import UserError
from atoll.settings import Run
from atoll.sharding import deepspeed
from atoll.sharding.deepspeed import config_of, refuse_unusable

__all__ = ["composed", "here", "tree"]
ZERO = "sharding.deepspeed.zero_optimization"
NVME = ("facility=karolina", "sharding=deepspeed_zero3_nvme")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run's words, as DeepSpeed's own reader has them."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    return lambda run: DeepSpeedConfig(config_of(run, torch.bfloat16))


def test_disks_are_named_in_words_that_deepspeed_takes(composed: Any, read: Any) -> None:
    with pytest.raises(UserError, match=r"setting missing: .*nvme_path"):
        composed(*NVME)
    run = composed(
        *NVME,
        f"{ZERO}.offload_optimizer.nvme_path=/local",
        "sharding.deepspeed.aio.block_size=262144",
    ).run
    words = read(run)
    for part in (words.zero_config.offload_optimizer, words.zero_config.offload_param):
        assert (part.device, str(part.nvme_path), part.pin_memory) == ("nvme", "/local", True)
    assert words.zero_optimization_stage == 3
    assert words.aio_config["block_size"] == 262144


def test_the_host_s_memory_is_pinned(composed: Any, read: Any) -> None:
    words = read(composed("facility=karolina", "sharding=deepspeed_zero3_offload").run)
    for part in (words.zero_config.offload_optimizer, words.zero_config.offload_param):
        assert (part.device, part.pin_memory) == ("cpu", True)


def test_a_word_that_deepspeed_does_not_know_is_named(composed: Any) -> None:
    run: Run = composed(
        "facility=karolina",
        "sharding=deepspeed_zero3_offload",
        f"+{ZERO}.offload_param.bufer_count=3",
    ).run
    with pytest.raises(UserError, match=r"zero_optimization\.offload_param\.bufer_count") as caught:
        refuse_unusable(run)
    assert "deepspeed.ai" in caught.value.hint


@pytest.mark.parametrize("built", [True, False])
def test_disks_need_an_operator_that_can_be_built(
    built: bool, composed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=True: built)
    run = composed(*NVME, f"{ZERO}.offload_optimizer.nvme_path=/local").run
    if built:
        refuse_unusable(run)
        return
    with pytest.raises(UserError, match="async_io") as caught:
        refuse_unusable(run)
    assert "libaio" in caught.value.hint


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What DeepSpeed finds in its environment as a run of a device starts."""
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    found: dict[str, str] = {}
    fake: Any = ModuleType("deepspeed")
    fake.initialize = lambda **_: (found.update(os.environ) or Mock(),)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setattr(deepspeed, "refuse_unusable", lambda run: None)

    def start(run: Run, device: torch.device) -> dict[str, str]:
        model = torch.nn.Linear(2, 2)  # in the host's memory, as offload has it
        deepspeed.initialize(run, model, None, torch.bfloat16, device)
        return found

    return start


@pytest.mark.parametrize("strategy", ["deepspeed_zero3_offload", "deepspeed_zero3"])
def test_offloaded_parameters_leave_the_arithmetic_on_the_device(
    strategy: str, composed: Any, told: Any
) -> None:
    run = composed("facility=karolina", f"sharding={strategy}").run
    assert "DS_ACCELERATOR" not in told(run, torch.device("cuda", 0))


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("ompi", [False, True])
def test_deepspeed_takes_the_device_that_the_rank_has(
    index: int, ompi: bool, composed: Any, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each task sees one device alone, that is the first, whatever the rank's number."""
    names = ["LOCAL_RANK", *["OMPI_COMM_WORLD_LOCAL_RANK"] * ompi]
    for name in names:
        monkeypatch.setenv(name, "3")
    run = composed("facility=karolina", "sharding=deepspeed_zero2").run
    found = told(run, torch.device("cuda", index))
    assert [found[name] for name in names] == [str(index)] * len(names)
    assert ("OMPI_COMM_WORLD_LOCAL_RANK" in found) == ompi
