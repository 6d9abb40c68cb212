"""Numbers that are none, and spikes: batches skipped, state rolled back, a run stopped; exact."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
from rank_pool import RankPool
from safetensors.torch import load_file

from atoll import run_dir
from atoll.errors import UserError
from atoll.health.faults import faults
from atoll.settings import Run
from atoll.sharding.engines import ENGINES
from atoll.sharding.process_group import World
from atoll.train import checkpoint, checkpoint_manifest, guard, loop
from atoll.train import train as trainer

BATCH = 8  # samples of a step
# (rank, position of the batch, loss, scale of the gradients) -> the two as they come out
Fault = Callable[[int, int, torch.Tensor, float], tuple[torch.Tensor, float]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


@contextmanager
def injected(world: World, run: Run, bad: set[int], factor: float) -> Iterator[list[int]]:
    """The positions of the batches taken; those of `bad` go wrong on the last rank."""
    positions: list[int] = []
    original, engine = loop.batches_ahead, ENGINES[run.sharding.step_engine]

    @contextmanager
    def batches_ahead(samples: Any, run: Run, position: int, steps: int, rank: int) -> Any:
        def numbered(shares: Any) -> Any:
            for number, share in enumerate(shares):
                positions.append(position + number * BATCH)
                yield share

        with original(samples, run, position, steps, rank) as shares:
            yield numbered(shares)

    def wrong(wrapped: Any, batches: Any, scale: float, plan: Any) -> torch.Tensor:
        hit = positions[-1] in bad and world.rank == world.size - 1
        loss = engine(wrapped, batches, scale * (factor if hit else 1.0), plan)
        return loss * factor if hit else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "batches_ahead", batches_ahead)
        patch.setitem(ENGINES, run.sharding.step_engine, wrong)
        yield positions


def train_with(
    world: World, run: Run, bad: set[int], factor: float = math.nan
) -> tuple[list[int], str]:
    """The positions of the batches a run took, and the mistake it ended with."""
    with injected(world, run, bad, factor) as positions:
        try:
            small_run.train_here(world, run)
        except UserError as error:
            return positions, f"{error.found}\n{error.hint}"
    return positions, ""


def settings(folder: Path, name: str, size: int = 2, **changes: Any) -> Run:
    return small_run.settings(folder, size, name=name, **changes)


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(run_dir.export(run_folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def positions_of(*steps: int) -> list[int]:
    """Where the batches begin that these steps take when nothing is jumped over."""
    return [(step - 1) * BATCH for step in steps]


STRATEGIES = [
    "ddp", "all_reduce", "full_shard", "hybrid_shard", "full_shard_offload", "deepspeed_zero2",
    "deepspeed_zero3", "context", "tensor", "pipeline",
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_that_is_no_number_is_skipped(ranks: RankPool, folder: Path, strategy: str) -> None:
    """Under every kind of sharding, where one rank alone meets it."""
    size = 4 if strategy == "hybrid_shard" else 2
    sharding = small_run.sharding(strategy)
    run = settings(folder, "skip", size, sharding=sharding, training__microbatch_samples=1)
    run_folder = small_run.ready(run)
    answers = ranks.run(train_with, run, set(positions_of(2, 4)), world=size)
    assert answers == [(positions_of(1, 2, 3, 4, 5, 6), "")] * size
    assert all(tensor.isfinite().all() for tensor in weights(run_folder).values())
    events = small_run.records(run_folder, "guard")
    assert [(e["step"], e["action"], e["kind"]) for e in events] == [
        (2, "skip", "non_finite"),
        (4, "skip", "non_finite"),
    ]
    assert [e["samples"] for e in events] == [[8, 16], [24, 32]]
    assert [(f.kind, f.blame, f.step, f.rank) for f in faults(run_folder)] == [
        ("non_finite", "data", step, size - 1) for step in (2, 4)
    ]
    losses = small_run.losses(run_folder)
    assert losses[2] is None and losses[4] is None
    assert losses[6] < losses[1]


def test_a_skipped_batch_changes_no_weight_and_no_moment(ranks: RankPool, folder: Path) -> None:
    """The oracle takes the same batches without those, with the learning rates of their steps."""
    run = settings(folder, "skip", 1, sharding=small_run.sharding("single"))
    skipped = small_run.ready(run)
    ranks.run(train_with, run, set(positions_of(3, 4)), world=1)
    again = settings(folder, "oracle", 1, sharding=small_run.sharding("single"))
    oracle = small_run.ready(again)
    ranks.run(train_without, again, [3, 4], world=1)
    expected = weights(oracle)
    assert all(torch.equal(t, expected[name]) for name, t in weights(skipped).items())


def train_without(world: World, run: Run, steps: list[int]) -> None:
    """The loop's own steps, but for those of `steps`, whose batches are taken and thrown away."""
    original = loop.update

    def update(train_state: Any, rate: float, judge: Any) -> torch.Tensor:
        if judge.args[0] not in steps:
            return original(train_state, rate, judge)
        judge(torch.ones(()))
        loop.clear_gradients(train_state.optimizer)
        return torch.ones(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", update)
        small_run.train_here(world, run)


@pytest.mark.parametrize("strategy", ["full_shard", "ddp", "deepspeed_zero1", "pipeline"])
def test_too_many_make_the_run_go_back_and_jump_over_the_data(
    ranks: RankPool, folder: Path, strategy: str
) -> None:
    changes = {"sharding": small_run.sharding(strategy), "training__microbatch_samples": 1}
    run = settings(folder, "back", guard={"skip_batches": 1}, training__steps=8, **changes)
    run_folder = small_run.ready(run)
    bad = set(positions_of(5, 6))
    expected = positions_of(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)  # step 4 takes the seventh batch
    assert ranks.run(train_with, run, bad, world=2) == [(expected, "")] * 2
    events = small_run.records(run_folder, "guard")
    assert [(e["action"], e["step"], e["at_step"], e["samples"]) for e in events] == [
        ("roll_back", 3, 6, [24, 48])
    ]
    assert [(f.step, f.blame) for f in faults(run_folder)] == [(5, "data"), (6, "data")]
    assert sorted(small_run.losses(run_folder)) == list(range(1, 9))
    last = checkpoint.load_progress(run_dir.checkpoint(run_folder, 8))
    assert last.samples == 11 * BATCH
    assert all(tensor.isfinite().all() for tensor in weights(run_folder).values())


@pytest.mark.parametrize("size", [2, 1])
def test_a_resume_behind_a_skip_and_a_jump_is_exact(
    ranks: RankPool, folder: Path, size: int
) -> None:
    """The same batches, and on as many ranks the same bits, as the run that was not stopped."""
    changes = {"guard": {"skip_batches": 1}, "training__steps": 9}
    bad = set(positions_of(5, 6, 9))
    whole = settings(folder, "whole", **changes)
    whole_folder = small_run.ready(whole)
    ((taken, _), _) = ranks.run(train_with, whole, bad, world=2)
    run = settings(folder, "stopped", **changes)
    run_folder = small_run.ready(run)
    ranks.run(stopped_behind, run, 6, bad, world=2)
    assert checkpoint.latest(run_folder) == run_dir.checkpoint(run_folder, 6)
    again = settings(folder, "stopped", size, **changes)
    answers = ranks.run(train_with, again, bad, world=size)
    assert answers[0] == (taken[-3:], "")
    assert small_run.losses(run_folder) == pytest.approx(
        small_run.losses(whole_folder), abs=0.0 if size == 2 else 1e-4
    )
    if size == 2:
        expected = weights(whole_folder)
        assert all(torch.equal(t, expected[name]) for name, t in weights(run_folder).items())
        files = [run_dir.checkpoint(f, 9) for f in (whole_folder, run_folder)]
        assert checkpoint.load_progress(files[0]) == checkpoint.load_progress(files[1])


def stopped_behind(world: World, run: Run, step: int, bad: set[int]) -> None:
    original = checkpoint.start_save

    def start(folder: Path, state: Any, progress: Any, *more: Any, **named: Any) -> Any:
        if progress.step > step:
            raise RuntimeError("stopped")
        return original(folder, state, progress, *more, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(checkpoint, "start_save", start)
        train_with(world, run, bad)


def phases_of_reading(world: World, run: Run, bad: set[int]) -> list[str]:
    """What a rank is at each time that a checkpoint's files are read whole."""
    phases: list[str] = []
    states: list[Any] = []
    original, assembled = checkpoint_manifest.verify, trainer.assemble

    def assemble(*arguments: Any) -> Any:
        states.append(assembled(*arguments))
        return states[-1]

    def verify(path: Path, world: World) -> None:
        phases.append(states[-1].heartbeat.phase)
        original(path, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "assemble", assemble)
        patch.setattr(checkpoint_manifest, "verify", verify)
        train_with(world, run, bad)
    return phases


def test_a_roll_back_reads_the_checkpoint_once_and_is_no_stall(
    ranks: RankPool, folder: Path
) -> None:
    run = settings(folder, "calm", guard={"skip_batches": 0}, training__steps=5)
    small_run.ready(run)
    assert ranks.run(phases_of_reading, run, {3 * BATCH}, world=2) == [["checkpoint"]] * 2


def test_a_run_that_nothing_helps_is_stopped(ranks: RankPool, folder: Path) -> None:
    """Two lines on every rank, the good checkpoints as they were, and no export."""
    run = settings(folder, "stop", guard={"skip_batches": 0, "roll_backs": 2})
    run_folder = small_run.ready(run)
    bad = set(range(4 * BATCH, 100 * BATCH, BATCH))
    answers = ranks.run(train_with, run, bad, world=2)
    # step 4 is good once; behind it, and behind each jump, the next batch is not
    expected = [n * BATCH for n in range(7)]
    for positions, mistake in answers:
        assert positions == expected
        found, hint = mistake.splitlines()
        assert "step 4: the loss is nan" in found and "gone back to 2 times" in found
        assert "optimizer.learning_rate" in hint
    assert checkpoint.latest(run_folder) == run_dir.checkpoint(run_folder, 3)
    assert not run_dir.export(run_folder).exists() and not run_dir.result_file(run_folder).exists()
    assert [f.blame for f in faults(run_folder)] == ["data", "data", "code"]


def test_a_run_without_a_checkpoint_is_stopped(ranks: RankPool, folder: Path) -> None:
    run = settings(folder, "never", guard={"skip_batches": 2})
    run_folder = small_run.ready(run)
    answers = ranks.run(train_with, run, set(positions_of(1, 2, 3, 4)), world=2)
    assert all("no checkpoint to go back to" in mistake for _, mistake in answers)
    assert not run_dir.checkpoints(run_folder).exists()
    assert not run_dir.export(run_folder).exists()


def test_a_state_that_is_no_number_is_not_saved(ranks: RankPool, folder: Path) -> None:
    """Of one rank's part; the run goes back to the checkpoint before, and ends well."""
    run = settings(folder, "state", guard={"roll_backs": 1})
    run_folder = small_run.ready(run)
    ranks.run(train_with_bad_moment, run, 5, world=2)
    (event,) = small_run.records(run_folder, "guard")
    assert (event["action"], event["step"], event["at_step"]) == ("roll_back", 3, 6)
    (fault,) = faults(run_folder)
    assert "the state of 1 of 2 ranks holds what is no number" in fault.evidence
    assert time.time() - 600 < fault.time <= time.time()
    assert all(tensor.isfinite().all() for tensor in weights(run_folder).values())


def train_with_bad_moment(world: World, run: Run, step: int) -> None:
    """Once, behind the update of `step`, a squared moment overflows on one rank."""
    original, done = loop.update, []

    def update(train_state: Any, rate: float, judge: Any) -> torch.Tensor:
        norm = original(train_state, rate, judge)
        if judge.args[0] == step and not done and world.rank == 1:
            done.append(step)
            state = train_state.optimizer.inner.state
            next(iter(state.values()))["exp_avg_sq"].to_local().view(-1)[0] = math.inf
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", update)
        small_run.train_here(world, run)


def test_a_spike_is_skipped_where_it_is_looked_for(ranks: RankPool, folder: Path) -> None:
    bad, window = set(positions_of(7)), {"window_steps": 8}
    acts = []
    for name, sigma in (("looks", 6.0), ("does_not", None)):
        more = window | {"spike_sigma": sigma}
        run = settings(folder, name, guard=more, training__steps=8, optimizer__learning_rate=1e-4)
        run_folder = small_run.ready(run)
        ranks.run(train_with, run, bad, 100.0, world=2)
        acts.append([(e["step"], e["kind"]) for e in small_run.records(run_folder, "guard")])
    assert acts == [[(7, "spike")], []]


def test_a_loss_is_judged_by_the_median_of_the_steps_before() -> None:
    """A spike that was let through, and what was skipped, hardly move the limit."""
    noise = torch.randn(2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    history = 2.0 + 0.1 * noise
    history[:, 3], history[:, 5] = 1000.0, math.nan

    def judged(value: float, steps: int = 64) -> bool:
        past = history.clone()
        past[:, : 64 - steps] = math.inf
        figures = torch.tensor([value, 2.0], dtype=torch.float64)
        return bool(guard.is_spike(figures, past, 6.0))

    assert [judged(value) for value in (-50.0, 2.3, 2.5, 2.8, 50.0)] == [False] * 3 + [True] * 2
    assert not judged(50.0, steps=20), "too few to judge by"


def test_the_history_is_what_a_checkpoint_kept() -> None:
    kept = {"loss": [2.0, None, 1.5], "log_gradient_norm": [0.1, None, 0.2]}
    start = checkpoint.Progress(3, 24, 0, 1, {}, kept)
    rows = guard.restored(start, 8)
    assert rows[0, :5].tolist() == [math.inf] * 5 and rows[0, 5:].tolist()[::2] == [2.0, 1.5]
    assert rows[0].isnan().sum() == 1
    assert guard.restored(start, 8)[:, 6:].isnan().any()


def test_a_checkpoint_of_an_older_run_is_read(tmp_path: Path) -> None:
    manifest = {"files": {}, "progress": {"step": 3, "samples": 24, "tokens": 9}}
    manifest["progress"] |= {"world_size": 2, "step_counts": {}}
    (tmp_path / checkpoint_manifest.MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint.load_progress(tmp_path).history == {}
