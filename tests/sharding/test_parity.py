"""Every strategy against one process: losses, gradient norms and final weights."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from atoll.models.build import build_config, build_model, weights_for
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Model, Optimizer, Sharding, Training
from atoll.sharding.engines import ENGINES, StepPlan
from atoll.sharding.layouts import AFTER_WEIGHTS, BEFORE_WEIGHTS, Spread, apply_layouts
from atoll.train.optimizer import make_stepper, take_step
from atoll.train.world import World, summed

CONF = Path(__file__).parents[2] / "hydra_conf" / "sharding"
STRATEGIES = ["ddp", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"]
STEPS = 5
SAMPLES = 8
RANKS_PER_NODE = 2  # four ranks then make two nodes
SINGLE = Sharding(name="single", layouts=[])


def strategy(name: str) -> Sharding:
    return Sharding(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))


def build(world: World, config: dict[str, Any], sharding: Sharding, recompute: str) -> Any:
    settings = Model(name="tiny", config=config)
    training = Training(
        steps=STEPS,
        global_batch_samples=SAMPLES,
        microbatch_samples=1,
        loss_chunk_tokens=24,
        recompute=recompute,
    )
    hf_config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model = build_model(hf_config, training)
    shard = {"none": 1, "node": RANKS_PER_NODE, "all": world.size}[str(sharding.shard)]
    mesh = None
    if sharding.layouts:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (world.size // shard, shard), mesh_dim_names=names)
    spread = Spread(sharding, torch.float32, world.device)
    apply_layouts(BEFORE_WEIGHTS, model, mesh, spread)
    materialize(model, world.device)
    with weights_for(settings, hf_config, seed=3) as read:
        fill(model.hf, read)
    fill_buffers(model.hf)
    return model, apply_layouts(AFTER_WEIGHTS, model, mesh, spread)


def train(
    world: World,
    config: dict[str, Any],
    sharding: Sharding,
    clip_norm: float | None,
    microbatch: int,
    sync_every: bool = False,
    recompute: str = "none",
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of a few steps on one repeated batch."""
    model, wrapped = build(world, config, sharding, recompute)
    settings = Optimizer(name="adamw", learning_rate=1e-2)
    stepper = make_stepper(settings, model)
    plan = StepPlan(torch.float32, False, sync_every, not sharding.reshard_after_forward)
    losses, norms = [], []
    share = SAMPLES // world.size
    for step in range(STEPS):
        seeds = [100 * (step % 2) + i for i in range(SAMPLES)]
        everything = [tiny.batch(seed) for seed in seeds]
        mine = seeds[world.rank * share : (world.rank + 1) * share]
        batches = [joined(mine[i : i + microbatch]) for i in range(0, share, microbatch)]
        scale = world.size / tiny.targets(everything)
        loss = ENGINES["plain"](wrapped, batches, scale, plan)
        losses.append(float(summed(world, loss)) / tiny.targets(everything))
        norms.append(float(take_step(stepper, 1e-2, clip_norm)))
    weights = {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in model.named_parameters()
    }
    return losses, norms, weights if world.rank == 0 else {}


def joined(seeds: list[int]) -> Any:
    batches = [tiny.batch(seed) for seed in seeds]
    lengths = tuple(n for b in batches for n in b.segment_lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    parts = [
        torch.cat([getattr(b, name) for b in batches])
        for name in ("tokens_BT", "labels_BT", "positions_BT")
    ]
    return type(batches[0])(*parts, ends, lengths, parts[0].numel())


@cache
def one_process(architecture: str, clip_norm: float | None) -> Any:
    alone = World(0, 1, torch.device("cpu"), None)
    return train(alone, tiny.CONFIGS[architecture], SINGLE, clip_norm, SAMPLES)


def assert_same(reference: Any, got: Any) -> None:
    assert got[0] == pytest.approx(reference[0], abs=1e-5)
    assert got[1] == pytest.approx(reference[1], rel=1e-3)
    assert got[2].keys() == reference[2].keys()
    for name, weight in reference[2].items():
        torch.testing.assert_close(got[2][name], weight, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_equals_one_process(ranks: RankPool, name: str, architecture: str) -> None:
    reference = one_process(architecture, 1.0)
    assert reference[0][4] < reference[0][0] - 0.05, "the model must learn for this to mean much"
    config = tiny.CONFIGS[architecture]
    got = ranks.run(train, config, strategy(name), 1.0, 1)
    assert_same(reference, got[0])
    assert all(losses == got[0][0] for losses, _, _ in got), "ranks must agree on every loss"


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_clipping_and_with_wider_microbatches(ranks: RankPool, name: str) -> None:
    got = ranks.run(train, tiny.CONFIGS["llama"], strategy(name), None, 2)
    assert_same(one_process("llama", None), got[0])


@pytest.mark.parametrize("name", ["ddp", "full_shard"])
def test_exchange_at_every_microbatch(ranks: RankPool, name: str) -> None:
    got = ranks.run(train, tiny.CONFIGS["gpt2"], strategy(name), 1.0, 1, True)
    assert_same(one_process("gpt2", 1.0), got[0])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_no_number(ranks: RankPool, recompute: str) -> None:
    got = ranks.run(
        train, tiny.CONFIGS["llama"], strategy("full_shard"), 1.0, 1, False, recompute, world=2
    )
    assert_same(one_process("llama", 1.0), got[0])


def test_clipping_acts(ranks: RankPool) -> None:
    unclipped = one_process("llama", None)
    clipped = ranks.run(train, tiny.CONFIGS["llama"], strategy("full_shard"), 1e-4, 1)[0]
    assert clipped[1][0] == pytest.approx(unclipped[1][0], rel=1e-3), "the norm before clipping"
    assert clipped[0][-1] != pytest.approx(unclipped[0][-1], abs=1e-4)
