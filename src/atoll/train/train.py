"""The trainer, top to bottom: join, build, resume, evaluate, loop, evaluate, export."""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from atoll import run_dir
from atoll.data.batch import Batch
from atoll.data.loader import batches_ahead
from atoll.errors import UserError
from atoll.launch import Placement
from atoll.models import export
from atoll.models.adapter import gathered_adapter, merged, write_adapter
from atoll.monitor import metrics
from atoll.monitor.comm_profile import observed
from atoll.monitor.loggers import check_installed
from atoll.settings import Run, load_run
from atoll.sharding.engines import ENGINES
from atoll.sharding.process_group import SharedError, World, gathered, joined, run_on_all_ranks, say
from atoll.train import checkpoint
from atoll.train.assemble import TrainState, assemble
from atoll.train.optimizer import clear_gradients, learning_rate, set_step_counts, step_counts
from atoll.train.record import (
    Meter,
    counting_energy,
    record_checkpoint,
    record_communication,
    record_evaluation,
    record_result,
    record_start,
    telling,
)
from atoll.train.state_dict import parameters_of, set_state, state_of, update
from atoll.train.stop_signals import (
    TIME_IS_OVER,
    StopSignal,
    agreement,
    note_restart,
    stop_signals,
)


@dataclass(frozen=True)
class Stopped:
    """Where the loop ended, and the exit code it was asked to end with (0: it was not)."""

    step: int
    code: int


def main(run_folder: Path, placement: Placement) -> int:
    """Train the run of `run_folder` as one rank; the exit code of this rank."""
    run = load_run(run_dir.settings_file(run_folder))
    # said by DCP for every checkpoint of a single process, which is what was asked for
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        with stop_signals(run_folder, placement.rank) as asked, joined(run, placement) as world:
            return train(run, run_folder, world, asked)
    except SharedError:
        # every rank has the same error: one of them says it
        if placement.rank == 0:
            raise
        return 2


def train(run: Run, run_folder: Path, world: World, asked: StopSignal) -> int:
    """The whole run; nothing is repeated that an earlier start of it has finished.

    Returns 0, or the exit code of a run that was asked to stop and saved its state.
    """
    run_on_all_ranks(world, lambda: check_installed(run.loggers))
    train_state = assemble(run, run_folder, world)
    if train_state.total_steps == 0:
        with telling(train_state, 0) as train_state:
            evaluate_alone(train_state)
        return 0
    progress = resume(train_state)
    if not gathered(world, is_finished(train_state, progress))[0]:
        with telling(train_state, progress.step) as train_state:
            return go_on(train_state, progress, asked)
    if not gathered(world, run_dir.export(run_folder).is_dir())[0]:
        export_model(train_state)
    return 0


def evaluate_alone(train_state: TrainState) -> None:
    """A run of no steps."""
    record_start(train_state)
    record_result(train_state, record_evaluation(train_state, 0))
    if train_state.run.export.untrained:
        export_model(train_state)


def go_on(train_state: TrainState, progress: checkpoint.Progress, asked: StopSignal) -> int:
    """The steps that are left, then the result and the export; the exit code."""
    if progress.step == 0:
        record_start(train_state)
        record_evaluation(train_state, 0)
    if progress.step < train_state.total_steps:
        with counting_energy(train_state) as record_energy:
            stopped = loop(train_state, progress, asked)
            record_energy(progress.step + 1, stopped.step)
        if stopped.code:
            return stop(train_state, stopped, stopped.step - progress.step)
    record_result(train_state, record_evaluation(train_state, train_state.total_steps))
    export_model(train_state)
    return 0


def is_finished(train_state: TrainState, start: checkpoint.Progress) -> bool:
    """Whether an earlier start took the last step, and wrote down the result."""
    all_steps = start.step == train_state.total_steps
    return all_steps and run_dir.result_file(train_state.run_folder).is_file()


def stop(train_state: TrainState, stopped: Stopped, steps_done: int) -> int:
    """End a run whose state is saved; the exit code says whether it goes on by itself."""
    run, world, step = train_state.run, train_state.world, stopped.step
    say(world, f"asked to stop: the state of step {step} is saved")
    if stopped.code == TIME_IS_OVER:
        first = world.rank == 0
        note = partial(note_restart, run, train_state.run_folder, step, steps_done)
        run_on_all_ranks(world, lambda: note() if first else None)
    return stopped.code


def resume(train_state: TrainState) -> checkpoint.Progress:
    """The progress of the newest checkpoint, with the model set to it; or of a fresh start."""
    world = train_state.world
    path = run_on_all_ranks(world, lambda: checkpoint.latest(train_state.run_folder))
    if path is None:
        run_on_all_ranks(
            world, lambda: checkpoint.check_space(train_state.run_folder, state_of(train_state))
        )
        return checkpoint.Progress(0, 0, 0, world.size, {})
    progress = run_on_all_ranks(world, lambda: checkpoint.load_progress(path))
    run_on_all_ranks(world, lambda: check_resumable(train_state, progress))
    state = state_of(train_state)
    checkpoint.load(path, state, world)
    set_state(train_state, state)
    set_step_counts(train_state.stepper, progress.step_counts)
    if world.rank == 0:
        metrics.truncate_after(train_state.run_folder, progress.step)
    say(world, f"resumed from {path} (step {progress.step})")
    return progress


def check_resumable(train_state: TrainState, progress: checkpoint.Progress) -> None:
    if progress.step_counts and progress.world_size != train_state.world.size:
        raise UserError(
            f"the 8-bit optimizer state was saved by {progress.world_size} ranks, "
            f"this start has {train_state.world.size}",
            f"start with {progress.world_size} ranks: 8-bit blocks do not reshard",
        )
    if progress.step > train_state.total_steps:
        raise UserError(
            f"the checkpoint stands at step {progress.step}, "
            f"the run ends at {train_state.total_steps}",
            "raise training.steps, or give the run another name=",
        )


def loop(train_state: TrainState, start: checkpoint.Progress, asked: StopSignal) -> Stopped:
    """The training loop."""
    run, world = train_state.run, train_state.world
    batch_samples = run.training.global_batch_samples
    engine = ENGINES[run.sharding.step_engine]
    meter = Meter(train_state, start.tokens)
    saving: checkpoint.Pending | None = None
    clear_gradients(train_state.stepper)
    with (
        metrics.display(train_state.total_steps, start.step, world.rank == 0) as show,
        batches_ahead(
            train_state.training,
            run,
            run.training.consumed_samples + start.samples,
            train_state.total_steps - start.step,
            run.axes.data_rank(world.rank),
        ) as batches,
        agreement(world, asked) as agreed_code,
    ):
        for step in range(start.step + 1, train_state.total_steps + 1):
            share = meter.waited(lambda: next(batches))
            microbatches = [
                batch.to(world.device)
                for batch in seeded(share.microbatches, run, step, world.rank)
            ]
            rate = learning_rate(run.optimizer, step, train_state.total_steps, run.axes.data)
            # one step is profiled: not the first, which warms up, and not again
            with observed(world, step == start.step + 2, run.ranks_per_node) as seen:
                loss_sum = engine(
                    train_state.wrapped,
                    microbatches,
                    run.axes.averaged / share.global_targets,
                    train_state.plan,
                )
                # what is being saved may not change while it is copied
                meter.checkpoint_seconds += checkpoint.await_copy(saving)
                norm = update(train_state, rate)
            if step == start.step + 2 and world.size > 1:
                meter.communication_seconds = seen.seconds
                record_communication(train_state, step, seen)
            meter.count(loss_sum, share.global_targets, share.global_useful)
            if step % run.training.log_every_steps == 0 or step == train_state.total_steps:
                record = meter.record(step, rate, norm)
                show(record)
            last = step == train_state.total_steps
            code = 0 if last else agreed_code()
            if is_due(step, run.checkpoint.every_steps) or last or code:
                meter.checkpoint_seconds += finished(train_state, saving)
                saving = save(train_state, step, step * batch_samples, meter.total_tokens)
                meter.checkpoint_seconds += saving.blocked_seconds
                if not run.checkpoint.asynchronous:
                    meter.checkpoint_seconds += finished(train_state, saving)
                    saving = None
            if is_evaluation_due(train_state, step) and not last:
                record_evaluation(train_state, step)
                meter.restart()
            if code:
                break
        finished(train_state, saving)
    return Stopped(step, code)


def finished(train_state: TrainState, saving: checkpoint.Pending | None) -> float:
    """Wait until a save is whole, and write down how long it took; the seconds waited."""
    if saving is None:
        return 0.0
    waited = checkpoint.finish(saving)
    record_checkpoint(train_state, saving)
    return waited


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def is_evaluation_due(train_state: TrainState, step: int) -> bool:
    """After so many steps, or with the step that ends so many epochs."""
    every, size = train_state.run.evaluation, train_state.run.training.global_batch_samples
    before, now = ((s * size) // len(train_state.training) for s in (step - 1, step))
    ends_epochs = now > before and is_due(now, every.every_epochs)
    return ends_epochs or is_due(step, every.every_steps)


def seeded(batches: list[Batch], run: Run, step: int, rank: int) -> list[Batch]:
    """Batches with the seeds of their dropout, which depend on nothing before this step.

    Nor on how many ranks there are: a microbatch is the n-th of the global batch, whoever has it.
    Ranks that work on one sample draw each for its own part.
    """
    axes = run.axes
    part = rank if axes.data < axes.world else 0
    numbers = [n * axes.data + axes.data_rank(rank) for n in range(len(batches))]
    words = [run_dir.digest([run.seed, step, number, part], 15) for number in numbers]
    return [replace(b, seed=int(word, 16)) for b, word in zip(batches, words, strict=True)]


def save(train_state: TrainState, step: int, samples: int, tokens: int) -> checkpoint.Pending:
    counts = step_counts(train_state.stepper)
    progress = checkpoint.Progress(step, samples, tokens, train_state.world.size, counts)
    return checkpoint.start_save(
        train_state.run_folder,
        state_of(train_state),
        progress,
        train_state.run.checkpoint.keep,
        train_state.world,
    )


def export_model(train_state: TrainState) -> None:
    """Write the Hugging Face folder: weights by all ranks, the rest by one, then one rename."""
    world, final = train_state.world, run_dir.export(train_state.run_folder)
    dtype = getattr(torch, train_state.run.export.dtype)
    plain, lora = parameters_of(train_state), train_state.run.model.lora
    adapter = {} if lora is None else gathered_adapter(plain)
    parameters = plain if lora is None else merged(train_state.model.hf, lora, plain)
    sizes = {name: p.numel() * dtype.itemsize for name, p in parameters.items()}
    limit = int(train_state.run.export.max_file_gib * 2**30)
    axes = train_state.run.axes
    # the ranks of a pipeline's stage write the files of its layers
    ranks, stage = axes.world // axes.pipeline, axes.stage(world.rank)
    every = gathered(world, sizes)[::ranks]
    plans = [export.plan_files(one, limit, ranks) for one in every]
    files = [names for plan in plans for names in plan]
    numbered = export.Numbered(sum(map(len, plans[:stage])), len(files))
    first = world.rank == 0
    partial = export.partial_folder(final)
    run_on_all_ranks(world, lambda: export.start(final) if first else None)
    run_on_all_ranks(
        world,
        lambda: export.write_weights(
            partial, parameters, dtype, plans[stage], numbered, world.rank % ranks, ranks
        ),
    )

    def rest() -> None:
        if adapter:
            write_adapter(partial / "adapter", train_state.run.model, adapter)
        total = sum(sum(one.values()) for one in every)
        architecture = type(train_state.model.hf).__name__
        export.write_rest(
            partial, train_state.config, architecture, dtype, files, total, train_state.tokenizer
        )
        export.publish(partial, final)

    run_on_all_ranks(world, lambda: rest() if first else None)
    say(world, f"exported to {final}")
