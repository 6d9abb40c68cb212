"""The learning rate's course, what is decayed, clipping, and the 8-bit optimizer on shards."""

import math
from typing import Any

import defaults
import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import get_linear_schedule_with_warmup

from atoll.settings import Optimizer
from atoll.sharding.process_group import World
from atoll.train.optimizer import (
    averaged,
    learning_rate,
    load_step_counts,
    make_optimizer,
    optimizer_state_dict,
    step_counts,
    take_step,
)


def settings(**values: Any) -> Optimizer:
    return Optimizer(**defaults.group("optimizer", **values))


COSINE = settings(name="adamw", learning_rate=1.0, warmup_steps=10, final_fraction=0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.1), (5, 0.5), (10, 1.0), (55, 0.55), (100, 0.1), (200, 0.1)],
)
def test_warm_up_then_cosine(step: int, expected: float) -> None:
    assert learning_rate(COSINE, step, 100, 4) == pytest.approx(expected)


def test_linear_decay_is_that_of_hugging_face() -> None:
    chosen = settings(learning_rate=2e-5, warmup_steps=0, decay="linear", final_fraction=0.0)
    net = nn.Linear(1, 1)
    theirs = torch.optim.AdamW(net.parameters(), lr=2e-5)
    schedule = get_linear_schedule_with_warmup(theirs, 0, 117)
    rates = []
    for _ in range(117):
        rates.append(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()
    assert [learning_rate(chosen, step, 117, 4) for step in range(1, 118)] == pytest.approx(rates)


def test_linear_decay_begins_at_the_peak_and_ends_above_its_last_value() -> None:
    chosen = settings(learning_rate=1.0, warmup_steps=10, decay="linear", final_fraction=0.1)
    rates = [learning_rate(chosen, step, 100, 4) for step in (5, 10, 11, 56, 100, 101, 200)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.11, 0.1, 0.1])


def test_wsd_holds_the_peak_and_cools_down_at_the_end() -> None:
    chosen = settings(learning_rate=1.0, warmup_steps=10, decay="wsd", final_fraction=0.1)
    rates = [learning_rate(chosen, step, 100, 4) for step in (5, 10, 50, 80, 85, 100, 120)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.1 + 0.9 * 0.5, 0.1, 0.1])
    chosen = chosen.model_copy(update={"cooldown_steps": 99})
    assert learning_rate(chosen, 10, 100, 4) == 1.0 > learning_rate(chosen, 11, 100, 4)


def test_inverse_sqrt_does_not_ask_when_training_ends() -> None:
    chosen = settings(learning_rate=1.0, warmup_steps=4, decay="inverse_sqrt", final_fraction=0.1)
    rates = [learning_rate(chosen, step, total, 4) for step, total in ((4, 9), (16, 20), (16, 99))]
    assert rates == [1.0, 0.5, 0.5]
    assert learning_rate(chosen, 10_000, 99, 4) == 0.1


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_scales_with_ranks(scale: str, factor: float) -> None:
    chosen = settings(name="adamw", learning_rate=0.5, decay="constant", scale_with_ranks=scale)
    assert learning_rate(chosen, 7, 100, 4) == pytest.approx(0.5 * factor)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64))


def test_only_matrices_are_decayed() -> None:
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = make_optimizer(settings(name="adamw", learning_rate=0.1, weight_decay=0.5), net)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    take_step(optimizer, 0.1, None)
    for name, parameter in net.named_parameters():
        factor = 0.95 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_clipping_bounds_the_update_and_reports_the_norm_before() -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer(settings(name="adamw", learning_rate=0.1), net)
    net.weight.grad = torch.tensor([[3.0, 4.0]])
    assert float(take_step(optimizer, 0.1, 1.0)) == pytest.approx(5.0)
    moment = optimizer_state_dict(optimizer)["weight/exp_avg"]
    assert moment.tolist() == [pytest.approx([0.06, 0.08])]
    assert net.weight.grad is None


def test_the_average_follows_the_weights_step_by_step() -> None:
    net = model()
    expected = [p.detach().clone() for p in net.parameters()]
    optimizer = make_optimizer(settings(name="adamw", learning_rate=0.1, ema_decay=0.9), net)
    for _ in range(3):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        take_step(optimizer, 0.1, None)
        expected = [
            0.9 * e + 0.1 * p.detach() for e, p in zip(expected, net.parameters(), strict=True)
        ]
    weights = [p.detach().clone() for p in net.parameters()]
    with averaged(optimizer):
        torch.testing.assert_close([p.detach() for p in net.parameters()], expected)
    assert all(torch.equal(a, p) for a, p in zip(weights, net.parameters(), strict=True))


def test_making_the_state_changes_no_weight() -> None:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    state = optimizer_state_dict(make_optimizer(settings(name="adamw", learning_rate=0.1), net))
    assert state and all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def eight_bit(world: World, sharded: bool) -> tuple[list[float], int]:
    net = model()
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = make_optimizer(settings(name="adamw_8bit", learning_rate=1e-2), net)
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(8):
        loss = (net(inputs) - inputs).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        take_step(optimizer, 1e-2, 1.0)
    counts = step_counts(optimizer)
    assert set(counts.values()) == {8}
    load_step_counts(optimizer, dict.fromkeys(counts, 9))
    assert set(step_counts(optimizer).values()) == {9}
    load_step_counts(optimizer, {"of_the_first_stage.weight": 7})
    assert set(step_counts(optimizer).values()) == {7}, "a later stage counts as the first one"
    held = sum(t.numel() * t.element_size() for t in optimizer_state_dict(optimizer).values())
    assert all(isinstance(p, DTensor) == sharded for p in net.parameters())
    return losses, held


@pytest.mark.image
def test_eight_bit_adamw_learns_on_shards_as_on_one_process(ranks: RankPool) -> None:
    alone, alone_bytes = ranks.run(eight_bit, False, world=1)[0]
    sharded = ranks.run(eight_bit, True, world=2)
    assert alone[-1] < alone[0] / 2
    assert sharded[0][0] == pytest.approx(alone, rel=0.05)
    assert sharded[0][1] < 0.6 * alone_bytes
    assert all(math.isfinite(x) for x in alone)


@pytest.mark.image
def test_eight_bit_state_is_smaller_than_fp32() -> None:
    net = nn.Linear(256, 256, bias=False)
    sizes = {}
    for name in ("adamw", "adamw_8bit"):
        optimizer = make_optimizer(settings(name=name, learning_rate=0.1), net)
        state = optimizer_state_dict(optimizer).values()
        sizes[name] = sum(t.numel() * t.element_size() for t in state)
    assert sizes["adamw_8bit"] < 0.3 * sizes["adamw"]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_asking_for_the_state_changes_no_step(name: str) -> None:
    """A run asks before its first step, to know whether a checkpoint will fit."""
    chosen = settings(name=name, learning_rate=0.1, weight_decay=0.0)
    weights = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = make_optimizer(chosen, model)
        if asks:
            optimizer_state_dict(optimizer)
        model(torch.ones(1, 64)).sum().backward()
        take_step(optimizer, 0.1, None)
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
