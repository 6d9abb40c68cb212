"""The training loop: batch, forward and backward, update, and what is due behind a step."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from atoll import run_dir
from atoll.data.batch import Batch
from atoll.data.loader import Share, batches_ahead
from atoll.data.waits import TimeIsOver
from atoll.data.windows import Windows
from atoll.monitor.observers import Observers, StepRecord
from atoll.settings import Run
from atoll.settings.learning import Training
from atoll.sharding.engines import ENGINES
from atoll.sharding.process_group import World, gathered
from atoll.train.assemble import TrainState
from atoll.train.checkpoint import Progress
from atoll.train.checkpoint_saver import CheckpointSaver
from atoll.train.evaluate import evaluate
from atoll.train.guard import Guard, Trouble
from atoll.train.optimizer import clear_gradients, learning_rate
from atoll.train.replay import Replay, microbatches_of
from atoll.train.state_dict import update
from atoll.train.stop_signals import TIME_IS_OVER, StopCode, exchanged_stop_code


@dataclass(frozen=True)
class LoopEnd:
    """The last step, and the exit code that a stop signal asked for (0: none did).

    With a trouble the state is no good, and nothing was saved behind it.
    """

    step: int
    stop_code: int
    trouble: Trouble | None = None


def loop(
    train_state: TrainState, start: Progress, stop_code: StopCode, observers: Observers
) -> LoopEnd:
    """Take the steps behind `start`; the state of the last one is saved when this returns."""
    world, total_steps = train_state.world, train_state.total_steps
    heartbeat = train_state.heartbeat
    guard, replay = Guard(train_state, start), Replay(train_state)
    saver = CheckpointSaver(train_state, start.step, guard, observers)
    tokens, is_saved = start.tokens, True
    clear_gradients(train_state.optimizer)
    with remaining_batches(train_state, start) as batches:
        for step in range(start.step + 1, total_steps + 1):
            heartbeat.step(step)
            code_of_all = exchanged_stop_code(world, lambda: max(stop_code(), saver.failure_code()))
            for observer in observers:
                observer.before_step(step)
            record = train_step(train_state, batches, step, tokens, guard, replay, saver)
            if record is None:
                step, code = step - 1, max(code_of_all(), TIME_IS_OVER)
                trouble = guard.settle(observers, wait=True)
                if trouble is None and not is_saved:
                    trouble = saver.save(step, tokens)
                break
            tokens = record.total_tokens
            last = step == total_steps
            heartbeat.at("communication")
            code = code_of_all()
            is_saved = last or code != 0 or saver.is_due(step)
            for observer in observers:
                observer.after_step(replace(record, is_saved=is_saved))
            trouble = guard.settle(observers, wait=is_saved)
            if is_saved and trouble is None:
                trouble = saver.save(step, tokens)
            if trouble is not None:
                break
            if code:  # an evaluation that is due now is the next start's: it may take long
                break
            if is_evaluation_due(train_state, step) and not last:
                evaluate(train_state, step, observers)
        saver.finish()
    for observer in observers:
        observer.on_end()
    return LoopEnd(step, code, trouble)


def train_step(
    train_state: TrainState,
    batches: Iterator[Share],
    step: int,
    tokens: int,
    guard: Guard,
    replay: Replay,
    saver: CheckpointSaver,
) -> StepRecord | None:
    """One optimizer step behind so many tokens: batch, gradients, update.

    None where the job's time is over before its batch is there.
    """
    run, heartbeat = train_state.run, train_state.heartbeat
    heartbeat.at("input")
    started = time.monotonic()
    share = taken(batches, train_state.world)
    if share is None:
        return None
    data_wait_seconds = time.monotonic() - started
    heartbeat.at("compute")
    if replay.is_due(step):
        saver.finish()  # what was good before is kept, whatever comes out
        least = microbatches_of(share, run)
        replay.before(step, partial(accumulate_gradients, train_state, least, step))
    loss_sum = accumulate_gradients(train_state, share, step)
    replay.behind(step)
    saver.await_copy()
    heartbeat.at("optimizer")
    place, span = run.training.place_in_schedule(step, train_state.total_steps)
    rate = learning_rate(run.optimizer, place, span, run.axes.data)
    norm = update(train_state, rate, partial(guard.judge, step, loss_sum, share.global_targets))
    return StepRecord(
        step=step,
        loss_sum=loss_sum,
        targets=share.global_targets,
        tokens=share.global_useful,
        epochs=share.epochs,
        total_tokens=tokens + share.global_useful,
        learning_rate=rate,
        gradient_norm=norm,
        data_wait_seconds=data_wait_seconds,
        checkpoint_seconds=saver.take_blocked_seconds(),
        skipped=guard.skipped,
    )


def taken(batches: Iterator[Share], world: World) -> Share | None:
    """The next share; None where any rank was told to stop while it waited for a window.

    All ranks open a window with the same step, so they agree at each that does.
    """
    try:
        share = next(batches)
    except TimeIsOver:
        share = None
    if share is not None and not share.opens_window:
        return share
    return None if any(gathered(world, share is None)) else share


def accumulate_gradients(train_state: TrainState, share: Share, step: int) -> Tensor:
    """Gradient accumulation: forward and backward over this rank's microbatches of a step.

    The gradients add up to those of the mean over all targets of the global batch. Returns this
    rank's summed loss.
    """
    run, plan = train_state.run, train_state.plan
    microbatches = on_device(share.microbatches, run, step, train_state.world)
    scale = run.axes.averaged / share.global_targets
    return ENGINES[run.sharding.step_engine](train_state.wrapped, microbatches, scale, plan)


def remaining_batches(
    train_state: TrainState, start: Progress
) -> AbstractContextManager[Iterator[Share]]:
    """This rank's part of each global batch behind `start`; ranks of one sample have the same."""
    run, steps = train_state.run, train_state.total_steps - start.step
    position = run.training.consumed_samples + start.samples
    data_rank = run.axes.data_rank(train_state.world.rank)
    return batches_ahead(train_state.training, run, position, steps, data_rank)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def is_evaluation_due(train_state: TrainState, step: int) -> bool:
    """After so many steps, or with the step that ends so many epochs."""
    every, size = train_state.run.evaluation, train_state.run.training.global_batch_samples
    if is_due(step, every.every_steps) or isinstance(train_state.training, Windows):
        return is_due(step, every.every_steps)
    before, now = ((s * size) // len(train_state.training) for s in (step - 1, step))
    return now > before and is_due(now, every.every_epochs)


def _place_of(training: Training, step: int) -> int | list[int]:
    """Of a step among all that lead to it, in earlier runs too; no other step has the same.

    Of the schedule it may be another than of the data: facilities take their own number of steps.
    """
    of_data = training.consumed_samples // training.global_batch_samples + step
    of_schedule = training.consumed_steps + step
    return of_data if of_data == of_schedule else [of_data, of_schedule]


def on_device(batches: list[Batch], run: Run, step: int, world: World) -> list[Batch]:
    """Microbatches with the seeds of their dropout, which depend on nothing before this step.

    Nor on how many ranks there are: a microbatch is the n-th of the global batch, whoever has it.
    Ranks that work on one sample draw each for its own part.
    """
    axes = run.axes
    part = world.rank if axes.data < axes.world else 0
    numbers = [n * axes.data + axes.data_rank(world.rank) for n in range(len(batches))]
    place = _place_of(run.training, step)
    digests = [run_dir.digest([run.order_seed, place, number, part], 15) for number in numbers]
    seeded = [replace(b, seed=int(word, 16)) for b, word in zip(batches, digests, strict=True)]
    return [batch.to(world.device) for batch in seeded]
