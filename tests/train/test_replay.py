"""Flipped bits: in a gradient, in a shard, in a copy; named before a checkpoint has them."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
from rank_pool import RankPool
from torch.distributed.tensor import DTensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.health.faults import faults
from atoll.models.parts import blocks_of
from atoll.settings import Run
from atoll.sharding.engines import ENGINES
from atoll.sharding.process_group import World
from atoll.train import checkpoint, loop
from atoll.train.replay import digest

HOST = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


@pytest.fixture
def refusing(ranks: RankPool) -> Iterator[RankPool]:
    """Ranks that end in the middle of a step, behind which torch shards no other model."""
    yield ranks
    ranks._restart()


def settings(folder: Path, strategy: str, size: int, name: str = "run", every: int = 2) -> Run:
    layout, _, axis = strategy.partition(" ")
    return small_run.settings(
        folder,
        size,
        name=name,
        sharding=small_run.sharding(layout) | ({axis: 2} if axis else {}),
        nodes=2 if size == 4 else 1,
        ranks_per_node=min(size, 2),
        facility__scheduler="slurm" if size == 4 else "none",
        guard={"replay_every_steps": every},
        training__microbatch_samples=1,
    )


def flip(tensor: torch.Tensor, bit: int = 20) -> None:
    """One bit of its first number."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    own.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


Engine = Callable[[Any, Any, float, Any], torch.Tensor]


def train_with_engine(world: World, run: Run, make: Callable[..., Engine]) -> str:
    """Train with an engine made from the run's own; the mistake it ended with."""
    name = run.sharding.step_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, name, make(ENGINES[name], world))
        return mistake(world, run)


def mistake(world: World, run: Run) -> str:
    try:
        small_run.train_here(world, run)
    except UserError as error:
        return f"{error.found}\n{error.hint}"
    return ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (16, 8), (0,)])
def test_each_flipped_bit_changes_a_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(digest(tensor))
    assert int(digest(tensor.clone())) == before
    for place in range(tensor.numel() * tensor.element_size()):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[place] ^= 1 << bit
            assert int(digest(changed)) != before


def test_a_digest_does_not_depend_on_where_a_tensor_lies() -> None:
    whole = torch.randn(7, 9)
    part, turned = whole[1:4, 3:8], whole.T
    assert int(digest(part)) == int(digest(part.clone()))
    assert int(digest(turned)) == int(digest(turned.clone(memory_format=torch.contiguous_format)))
    shifted = torch.empty(13, dtype=torch.float32)[1:].copy_(whole.flatten()[:12])
    assert int(digest(shifted)) == int(digest(whole.flatten()[:12].clone()))


STRATEGIES = [
    "single", "ddp", "gather_scatter", "full_shard", "hybrid_shard_zero2", "full_shard_offload",
    "deepspeed_zero1", "deepspeed_zero3", "context", "tensor", "pipeline", "pipeline_interleaved",
]  # fmt: skip


@pytest.mark.matrix(always=lambda strategy: strategy == "full_shard")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replays_change_no_loss(ranks: RankPool, folder: Path, strategy: str) -> None:
    size = {"single": 1, "hybrid_shard_zero2": 4}.get(strategy, 2)
    results = []
    for name, every in (("with", 1), ("without", 0)):
        run = settings(folder, strategy, size, name, every)
        if strategy == "pipeline_interleaved":
            layers = run.model.config | {"num_hidden_layers": 4}
            run = run.model_copy(update={"model": run.model.model_copy(update={"config": layers})})
        run_folder = small_run.ready(run)
        assert ranks.run(mistake, run, world=size) == [""] * size
        results.append((small_run.losses(run_folder), run_dir.result_file(run_folder).read_text()))
        assert faults(run_folder) == []
    assert results[0] == results[1]


def flips_a_gradient(engine: Engine, world: World) -> Engine:
    """On rank 1, in the second of the passes that are compared at step 2."""
    calls: list[int] = []

    def step(wrapped: Any, batches: Any, scale: float, plan: Any) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) != 3 or world.rank != 1:
            return engine(wrapped, batches, scale, plan)
        model = getattr(wrapped, "module", wrapped)

        def flipped(gradient: torch.Tensor) -> torch.Tensor:
            changed = gradient.clone()
            flip(changed)
            return changed

        def watch(module: Any, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            out.register_hook(flipped)

        handle = blocks_of(model.hf, model.parts)[-1].register_forward_hook(watch)
        try:
            return engine(wrapped, batches, scale, plan)
        finally:
            handle.remove()

    return step


@pytest.mark.parametrize("strategy", ["ddp", "all_reduce", "full_shard", "deepspeed_zero3"])
def test_a_flipped_bit_of_a_gradient_names_its_rank(
    refusing: RankPool, folder: Path, strategy: str
) -> None:
    run = settings(folder, strategy, 2)
    run_folder = small_run.ready(run)
    for answer in refusing.run(train_with_engine, run, flips_a_gradient, world=2):
        found, _ = answer.splitlines()
        assert f"step 2: corrupted on {HOST}, rank 1: " in found and "computed twice" in found
    (fault,) = faults(run_folder)
    assert (fault.kind, fault.blame, fault.node, fault.rank) == ("corrupted", "node", HOST, 1)
    assert time.time() - 600 < fault.time <= time.time()
    assert not run_dir.checkpoints(run_folder).exists()
    assert not run_dir.export(run_folder).exists()


def flips_a_shard(engine: Engine, world: World) -> Engine:
    """On rank 1, while it computes step 4, and not before: behind a good checkpoint."""
    calls: list[int] = []

    def step(wrapped: Any, batches: Any, scale: float, plan: Any) -> torch.Tensor:
        calls.append(len(calls))
        loss = engine(wrapped, batches, scale, plan)
        if len(calls) == 8 and world.rank == 1:  # two of steps 2 and 4 more than one a step
            flip(next(p for p in wrapped.parameters() if p.numel()))
        return loss

    return step


def test_a_shard_that_changes_by_itself_names_its_rank(refusing: RankPool, folder: Path) -> None:
    run = settings(folder, "full_shard", 2)
    run_folder = small_run.ready(run)
    for answer in refusing.run(train_with_engine, run, flips_a_shard, world=2):
        assert f"step 4: corrupted on {HOST}, rank 1: model/" in answer
    (fault,) = faults(run_folder)
    assert (fault.blame, fault.rank, fault.step) == ("node", 1, 4)
    assert checkpoint.latest(run_folder) == run_dir.checkpoint(run_folder, 3)


def train_with_flipped_copy(world: World, run: Run, rank: int, moment: bool) -> str:
    """Behind an update a bit flips in one rank's copy, with no replay to see it.

    DeepSpeed's next update heals it: there it is the one before the checkpoint.
    """
    step = 3 if run.sharding.engine == "deepspeed" else 2
    original = loop.update

    def update(train_state: Any, rate: float, judge: Any) -> torch.Tensor:
        norm = original(train_state, rate, judge)
        if judge.args[0] == step and world.rank == rank:
            parameter, own = next(iter(train_state.optimizer.parameters.values()))
            flip(train_state.optimizer.inner.state[own]["exp_avg"] if moment else parameter)
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", update)
        return mistake(world, run)


@pytest.mark.parametrize(
    ("strategy", "moment", "named"),
    [
        ("ddp", False, "rank 2: model/"),
        ("ddp", True, "rank 2: optimizer/"),
        ("deepspeed_zero1", False, "rank 2: copy/"),
        # of two copies nobody knows which is the good one
        ("hybrid_shard", False, "rank 0, 2: model/"),
        # whose norms are in a second group of copies
        ("hybrid_shard tensor", False, "rank 0, 2: model/"),
    ],
)
def test_a_flipped_bit_of_a_copy_is_in_no_checkpoint(
    refusing: RankPool, folder: Path, strategy: str, moment: bool, named: str
) -> None:
    run = settings(folder, strategy, 4, every=0)
    run_folder = small_run.ready(run)
    for answer in refusing.run(train_with_flipped_copy, run, 2, moment):
        assert f"step 3: corrupted on {HOST}, {named}" in answer and "copies" in answer
    (fault,) = faults(run_folder)
    assert (fault.kind, fault.blame, fault.node) == ("corrupted", "node", HOST)
    assert checkpoint.latest(run_folder) is None


def varies(engine: Engine, world: World) -> Engine:
    calls: list[int] = []

    def step(wrapped: Any, batches: Any, scale: float, plan: Any) -> torch.Tensor:
        calls.append(len(calls))
        return engine(wrapped, batches, scale * (1.0 + 1e-6 * len(calls)), plan)

    return step


def test_arithmetic_that_varies_is_no_fault(ranks: RankPool, folder: Path) -> None:
    run = settings(folder, "ddp", 2)
    run_folder = small_run.ready(run)
    assert ranks.run(train_with_engine, run, varies, world=2) == ["", ""]
    assert faults(run_folder) == [] and run_dir.export(run_folder).is_dir()
