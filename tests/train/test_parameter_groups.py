"""Parameters that learn otherwise than the rest, or not at all."""

from pathlib import Path
from typing import Any

import defaults
import pytest
import small_run
import torch
from rank_pool import RankPool
from safetensors.torch import load_file
from torch import nn

from atoll import run_dir
from atoll.errors import UserError
from atoll.settings import Optimizer
from atoll.train.optimizer import make_optimizer, take_step
from atoll.train.parameter_groups import freeze, optimizer_groups


def settings(*groups: dict[str, Any], **values: Any) -> Optimizer:
    return Optimizer(**defaults.group("optimizer", name="adamw", groups=groups, **values))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "down": nn.Linear(8, 4)})


def moved(net: nn.Module, chosen: Optimizer) -> dict[str, float]:
    """By how much each parameter changed in one step of gradients of 1."""
    freeze(chosen, net)
    optimizer = make_optimizer(chosen, net)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    take_step(optimizer, 0.1, None)
    return {
        name: float((before[name] - p.detach()).abs().max()) for name, p in net.named_parameters()
    }


def test_the_first_group_that_names_a_parameter_has_it() -> None:
    groups = [{"names": "up.*", "learning_rate_factor": 0.1}, {"names": "*.bias", "frozen": True}]
    change = moved(model(), settings(*groups, weight_decay=0.0))
    assert change == {
        "up.weight": pytest.approx(0.01, rel=1e-4),
        "up.bias": pytest.approx(0.01, rel=1e-4),
        "norm.weight": pytest.approx(0.1, rel=1e-4),
        "norm.bias": 0.0,
        "down.weight": pytest.approx(0.1, rel=1e-4),
        "down.bias": 0.0,
    }


def test_a_group_has_its_own_weight_decay() -> None:
    chosen = settings({"names": "down.*", "weight_decay": 0.0}, weight_decay=0.5)
    groups = make_optimizer(chosen, model()).inner.param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.5), (5, 0.0)]


def test_a_copy_on_another_stage_learns_as_what_it_is_a_copy_of() -> None:
    """An embedding that is the head too, at the two ends of a pipeline: they have to stay alike."""
    group = {"names": "embed.*", "learning_rate_factor": 0.3, "weight_decay": 0.2}
    weight, copied = nn.Parameter(torch.zeros(2, 2)), {"hf.head.weight": "hf.embed.weight"}
    [made] = optimizer_groups(settings(group), [("hf.head.weight", weight)], copied=copied)
    assert (made["learning_rate_factor"], made["weight_decay"]) == (0.3, 0.2)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([{"names": "across.*"}], "'across.*' names no parameter .* up.weight, up.bias"),
        ([{"names": "up.*"}, {"names": "up.bias"}], "'up.bias' names no parameter"),
        ([{"names": "*", "frozen": True}], "every parameter is frozen"),
    ],
)
def test_a_group_of_nothing_is_a_mistake(groups: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(UserError) as refused:
        freeze(settings(*groups), model())
    text = f"{refused.value.found} {refused.value.hint}"
    assert all(part in text for part in reason.split(" .* ")), text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").symlink_to(small_run.shared_text())
    return tmp_path


GROUPS = [
    {"names": "*.embed_tokens.*", "frozen": True},
    {"names": "*.mlp.*", "learning_rate_factor": 0.3, "weight_decay": 0.0},
]


def trained(ranks: RankPool, folder: Path, sharding: str, steps: int = 6) -> Path:
    world = 1 if sharding == "single" else 2
    changes = {"optimizer__groups": GROUPS, "export__dtype": "float32", "training__steps": steps}
    run = small_run.settings(
        folder, world, name=sharding, sharding=small_run.sharding(sharding), **changes
    )
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=world)
    return run_folder


@pytest.mark.parametrize("sharding", ["full_shard", "ddp"])
def test_frozen_parts_stay_however_the_rest_is_divided(
    ranks: RankPool, folder: Path, sharding: str
) -> None:
    """And a run goes on without them in its checkpoint."""
    alone, run_folder = trained(ranks, folder, "single"), trained(ranks, folder, sharding)
    assert small_run.losses(run_folder) == pytest.approx(small_run.losses(alone), abs=1e-4)
    first = weights(run_folder)
    last = weights(trained(ranks, folder, sharding, steps=8))
    changed = {key for key in first if not torch.equal(first[key], last[key])}
    assert changed == {key for key in first if "embed_tokens" not in key}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(run_dir.export(folder).glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}
