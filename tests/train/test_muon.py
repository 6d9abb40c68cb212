"""Muon takes the steps of torch's own, however its matrices are divided."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import defaults
import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from test_train import stop_after
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.settings import Optimizer
from atoll.train.optimizer import make_optimizer, take_step

CONFIG = tiny.CONFIGS["llama"] | {"vocab_size": 300, "num_key_value_heads": 4}
RATE = 0.01


class Wrapped(nn.Module):
    """A model as the trainer holds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
        self.parts = SimpleNamespace(blocks="model.layers")


def test_one_process_takes_the_steps_of_torch_s_own() -> None:
    ours, theirs = Wrapped(), Wrapped()
    settings = Optimizer(**defaults.group("optimizer", name="muon", learning_rate=RATE))
    optimizer = make_optimizer(settings, ours)
    named = dict(theirs.named_parameters())
    hidden = [p for n, p in named.items() if ".layers." in n and p.ndim == 2]
    matrices = torch.optim.Muon(
        hidden,
        lr=RATE,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [p for n, p in named.items() if ".layers." not in n or p.ndim < 2]
    decay = [{"params": [p], "weight_decay": 0.1 * (p.ndim == 2)} for p in rest]
    others = torch.optim.AdamW(decay, lr=RATE, betas=settings.betas, eps=settings.epsilon)
    assert len(hidden) == 7 * CONFIG["num_hidden_layers"]
    for _ in range(3):
        for name, parameter in ours.named_parameters():
            gradient = torch.randn_like(parameter)
            parameter.grad, named[name].grad = gradient, gradient.clone()
        take_step(optimizer, RATE, None)
        matrices.step()
        others.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("muon")
    small_run.write_text(path)
    return path


def trained(
    ranks: RankPool, folder: Path, strategy: str, world: int, stop: int = 0, **sharding: Any
) -> Path:
    run = small_run.settings(
        folder,
        world,
        name=f"muon-{strategy}",
        model__config=CONFIG | {"num_hidden_layers": 4},
        sharding=small_run.sharding(strategy) | sharding,
        optimizer__name="muon",
        export__dtype="float32",
        training__steps=4,
        checkpoint__every_steps=2,
    )
    made = small_run.ready(run)
    if stop:
        ranks.run(stop_after, run, stop, world=world)
    ranks.run(small_run.train_here, run, world=world)
    return made


@pytest.fixture(scope="module")
def whole(ranks: RankPool, folder: Path) -> dict[int, float]:
    losses = small_run.losses(trained(ranks, folder, "single", 1))
    assert losses[4] < losses[1]
    return losses


@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [
        ("full_shard", {}),
        pytest.param("ddp", {}, marks=pytest.mark.full),
        pytest.param("hybrid_shard", {"shard": 2}, marks=pytest.mark.full),
        pytest.param("tensor", {}, marks=pytest.mark.full),
        pytest.param("context", {}, marks=pytest.mark.full),
        pytest.param("pipeline", {}, marks=pytest.mark.full),
    ],
)
def test_divided_matrices_learn_as_whole_ones(
    ranks: RankPool, folder: Path, whole: dict[int, float], strategy: str, sharding: dict[str, Any]
) -> None:
    """And go on from a checkpoint of their own."""
    made = trained(ranks, folder, strategy, 4, stop=2, **sharding)
    # the iteration is in bf16; of each rank's own part alone, the losses differ by 0.03
    assert small_run.losses(made) == pytest.approx(whole, abs=1e-4)
