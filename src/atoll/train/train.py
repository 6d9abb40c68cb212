"""The trainer, top to bottom: join, build, resume, evaluate, loop, evaluate, export."""

import json
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.errors import UserError
from atoll.health.heartbeat import Heartbeat
from atoll.health.preflight import preflight
from atoll.health.watched import last_words, watched_rank
from atoll.launch import Placement
from atoll.monitor import metrics_file
from atoll.monitor.loggers import check_installed
from atoll.monitor.observers import Observers, Record, WatchedRun
from atoll.monitor.watch import watching
from atoll.settings import Run, load_run
from atoll.sharding.process_group import (
    SharedError,
    World,
    check_transport,
    joined,
    of_first,
    run_on_all_ranks,
    run_on_first_rank,
    say,
)
from atoll.train import checkpoint
from atoll.train.assemble import TrainState, assemble
from atoll.train.checkpoint_files import bytes_of_all, names_in
from atoll.train.checkpoint_saver import texts_of, tokenizer_of
from atoll.train.evaluate import Evaluation, evaluate
from atoll.train.export_model import export_model
from atoll.train.guard import Trouble, note
from atoll.train.loop import LoopEnd, is_evaluation_due, loop
from atoll.train.optimizer import averaged, load_step_counts
from atoll.train.reference import set_reference
from atoll.train.state_dict import load_state_dict, shapes, state_dict
from atoll.train.stop_signals import (
    INTERRUPTED,
    TIME_IS_OVER,
    StopCode,
    exchanged_stop_code,
    note_restart,
    stop_signals,
)


def main(run_folder: Path, placement: Placement) -> int:
    """Train the run of `run_folder` as one rank; the exit code of this rank."""
    run = load_run(run_dir.settings_file(run_folder))
    # DCP warns so at every checkpoint of a single process, which is what was asked for
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        with (
            stop_signals(run_folder, placement.rank) as code,
            watched_rank(run, run_folder, placement) as own,
            joined(run, placement) as world,
            last_words(own, placement),
        ):
            return train(run, run_folder, world, code, own)
    except SharedError:
        # every rank has the same error: the first prints it
        if placement.rank == 0:
            raise
        return 2


def train(
    run: Run,
    run_folder: Path,
    world: World,
    stop_code: StopCode,
    own: Heartbeat | None = None,
) -> int:
    """The whole run; nothing is repeated that an earlier start of it has finished.

    Returns 0, or the exit code of a run that a signal stopped and that saved its state.
    """
    check_transport(run, world)
    run_on_all_ranks(world, lambda: check_installed(run.loggers))
    tried = preflight(run, run_folder, world)
    train_state = assemble(run, run_folder, world, own)
    # before a checkpoint takes the place of the weights that the run began with
    set_reference(train_state)
    if train_state.total_steps == 0:
        evaluate_alone(train_state)
        return 0
    progress = resume(train_state)
    if not of_first(world, is_finished(train_state, progress)):
        return train_from(train_state, progress, stop_code, tried)
    if not of_first(world, run_dir.export(run_folder).is_dir()):
        export_model(train_state)
    return 0


def train_from(
    train_state: TrainState,
    progress: checkpoint.Progress,
    stop_code: StopCode,
    tried: Record | None,
) -> int:
    """The steps behind `progress`, as often as a trouble makes the run go back; the exit code."""
    trouble, roll_backs = None, Counter[int]()
    while True:
        with watching(watched(train_state, progress.step, tried)) as observers:
            if trouble is not None:
                note(train_state, observers, trouble, "roll_back", "data", progress.step)
            end = take_remaining_steps(train_state, progress, stop_code, observers)
        if isinstance(end, int):
            return end
        tried = None
        with train_state.heartbeat.at("checkpoint"):  # which is read whole: that may take long
            progress, trouble = roll_back(train_state, end, roll_backs)


def watched(train_state: TrainState, resumed_step: int, tried: Record | None = None) -> WatchedRun:
    """What the observers of a run know of it."""
    return WatchedRun(
        run=train_state.run,
        run_folder=train_state.run_folder,
        world=train_state.world,
        shape=train_state.shape,
        compute_dtype=train_state.plan.compute_dtype,
        packing=train_state.training.plan,
        total_steps=train_state.total_steps,
        resumed_step=resumed_step,
        heartbeat=train_state.heartbeat,
        communication_bytes=train_state.communication_bytes,
        wrapped=train_state.wrapped,
        preflight=tried,
    )


def evaluate_alone(train_state: TrainState) -> None:
    """A run of no steps."""
    with watching(watched(train_state, 0)) as observers:
        write_result(train_state, evaluate(train_state, 0, observers))
        if train_state.run.export.untrained:
            export_model(train_state)


def take_remaining_steps(
    train_state: TrainState,
    progress: checkpoint.Progress,
    stop_code: StopCode,
    observers: Observers,
) -> int | Trouble:
    """The steps behind `progress`, then the result and the export; the exit code.

    Or the trouble with which they ended.
    """
    if progress.step == 0 or is_evaluation_owed(train_state, progress.step):
        evaluate(train_state, progress.step, observers)
    if progress.step < train_state.total_steps:
        forget_result(train_state)
        end = loop(train_state, progress, stop_code, observers)
        if end.trouble is not None:
            return end.trouble
        if end.stop_code:
            note_stop(train_state, end)
            return end.stop_code
    final = evaluate(train_state, train_state.total_steps, observers)
    average = None
    if train_state.optimizer.averages:
        with averaged(train_state.optimizer):
            average = evaluate(train_state, train_state.total_steps, ())
    forget_exports(train_state)
    write_result(train_state, final, average)
    code = exchanged_stop_code(train_state.world, stop_code)()
    if code:  # the next start exports
        note_stop(train_state, LoopEnd(train_state.total_steps, code))
        return code
    export_model(train_state)
    return 0


def is_evaluation_owed(train_state: TrainState, step: int) -> bool:
    """Whether an earlier start of this run ended between a checkpoint and its evaluation."""
    if step == train_state.total_steps or not is_evaluation_due(train_state, step):
        return False
    folder = train_state.run_folder
    owed = (
        train_state.world.rank == 0
        and step in run_dir.complete_checkpoints(folder)
        and not metrics_file.has(folder, "evaluation", step)
    )
    return bool(of_first(train_state.world, owed))


def forget_result(train_state: TrainState) -> None:
    """A run that was finished, and is given more steps, is not finished any more."""
    if train_state.world.rank == 0:
        run_dir.result_file(train_state.run_folder).unlink(missing_ok=True)


def forget_exports(train_state: TrainState) -> None:
    """What fewer steps made goes before the result that it is not of."""
    folder = train_state.run_folder
    if train_state.world.rank == 0:
        for export in (run_dir.export(folder), run_dir.averaged_export(folder)):
            shutil.rmtree(export, ignore_errors=True)
        run_dir.sample_file(folder).unlink(missing_ok=True)


def is_finished(train_state: TrainState, start: checkpoint.Progress) -> bool:
    """Whether an earlier start took the last step, and wrote down the result."""
    all_steps = start.step == train_state.total_steps
    return all_steps and run_dir.result_file(train_state.run_folder).is_file()


def write_result(
    train_state: TrainState, final: Evaluation, average: Evaluation | None = None
) -> None:
    """average: of the average of the weights."""
    if train_state.world.rank == 0:
        result: dict[str, Any] = {"steps": train_state.total_steps, **final.record()}
        result |= {"ema": average.record()} if average else {}
        file = run_dir.result_file(train_state.run_folder)
        run_dir.write_whole(file, json.dumps(result, indent=1))


def note_stop(train_state: TrainState, end: LoopEnd) -> None:
    """A run that was stopped in time, its state saved, is queued again where its time was over."""
    world = train_state.world
    if end.stop_code != INTERRUPTED:  # of which the job's shell tells
        say(world, f"asked to stop: the state of step {end.step} is saved")
    if end.stop_code == TIME_IS_OVER:
        note = partial(note_restart, train_state.run, train_state.run_folder, end.step)
        run_on_first_rank(world, note)


def resume(train_state: TrainState, found: Path | None = None) -> checkpoint.Progress:
    """The progress of the newest checkpoint, with the model set to it; or of a fresh start.

    found: the newest, where its files were just compared with what was written.
    """
    world = train_state.world
    folder, keep = train_state.run_folder, train_state.run.checkpoint.keep
    path = found or checkpoint.newest_intact(folder, world)
    is_verified = path is not None
    if path is None:
        each_bytes = bytes_of_all(shapes(train_state), world)
        run_on_all_ranks(world, lambda: checkpoint.check_space(folder, each_bytes, keep))
        path = train_state.run.checkpoint.initial_load_path
    if path is None:
        load_moments(train_state)
        return checkpoint.Progress(0, 0, 0, world.size, {})
    progress = run_on_all_ranks(world, lambda: checkpoint.load_progress(path))
    run_on_all_ranks(world, lambda: check_resumable(train_state, progress))
    if is_verified:  # it is this run's own
        run_on_all_ranks(world, lambda: check_text(train_state, progress))
    else:
        run_on_all_ranks(world, lambda: refuse_frozen(train_state, path))
    state = state_dict(train_state)
    checkpoint.load(path, state, world, is_verified)
    load_state_dict(train_state, state)
    load_step_counts(train_state.optimizer, progress.step_counts)
    say(world, f"resumed from {path} (step {progress.step})")
    return progress


def refuse_frozen(train_state: TrainState, path: Path) -> None:
    """What is frozen is as the source has it: nothing of it is read from another run's checkpoint.

    Raises `UserError` where that run had learned some of it.
    """
    named = train_state.model.named_parameters()
    frozen = {f"model/{name}" for name, parameter in named if not parameter.requires_grad}
    learned = sorted(frozen & names_in(path)) if frozen else []
    if learned:
        name = learned[0].removeprefix("model/").removeprefix("hf.")
        raise UserError(
            f"the run of {path} learned {name}, which is frozen here: it would be the source's",
            f"begin with what it exported: model.source={run_dir.export(path.parents[1])}, and its "
            "moments with checkpoint.optimizer_load_path",
        )


def load_moments(train_state: TrainState) -> None:
    """The optimizer's state of another run, where one is named; the weights stay as they are."""
    path, world = train_state.run.checkpoint.optimizer_load_path, train_state.world
    if path is None:
        return
    progress = run_on_all_ranks(world, lambda: checkpoint.load_progress(path))
    run_on_all_ranks(world, lambda: check_world(train_state, progress))
    state = state_dict(train_state)
    moments = {name: t for name, t in state.items() if name.startswith("optimizer/")}
    checkpoint.load(path, moments, world)
    load_state_dict(train_state, state | moments)
    load_step_counts(train_state.optimizer, progress.step_counts)
    say(world, f"the optimizer's state is that of {path}")


def roll_back(
    train_state: TrainState, trouble: Trouble, roll_backs: Counter[int]
) -> tuple[checkpoint.Progress, Trouble]:
    """Set the state to the newest checkpoint, and the data behind what the trouble came with.

    roll_backs: how often each checkpoint was gone back to. Raises `SharedError` where that does not
    help, or there is none.
    """
    world, allowed = train_state.world, train_state.run.guard.roll_backs
    path = checkpoint.newest_intact(train_state.run_folder, world)
    step = (
        0 if path is None else run_on_all_ranks(world, lambda: checkpoint.load_progress(path)).step
    )
    if path is None or roll_backs[step] >= allowed:
        note(train_state, (), trouble, "stop", "code", step)
        there = f"{path} was gone back to {roll_backs[step]} times"
        raise SharedError(
            f"step {trouble.step}: {trouble.what}, after {max(0, trouble.skipped - 1)} skipped "
            f"batches; {'there is no checkpoint to go back to' if path is None else there}",
            "lower optimizer.learning_rate, look at the data that faults.jsonl names, or raise "
            "guard.skip_batches or guard.roll_backs; the same line then goes on from there",
        )
    roll_backs[step] += 1
    progress = resume(train_state, path)
    jumped = (progress.samples, trouble.samples[1])
    return replace(progress, samples=jumped[1]), replace(trouble, samples=jumped)


def check_world(train_state: TrainState, progress: checkpoint.Progress) -> None:
    if progress.step_counts and progress.world_size != train_state.world.size:
        raise UserError(
            f"the 8-bit optimizer state was saved by {progress.world_size} ranks, "
            f"this start has {train_state.world.size}",
            f"start with {progress.world_size} ranks: 8-bit blocks do not reshard",
        )


def check_text(train_state: TrainState, progress: checkpoint.Progress) -> None:
    """A position in one text is none in another, and a token of one tokenizer another's word."""
    is_over = progress.step >= train_state.total_steps  # no samples are taken any more
    if is_over and run_dir.export(train_state.run_folder).is_dir():
        return
    trained = f"run {train_state.run.name} was trained {progress.step} steps on"
    if not is_over and progress.texts and progress.texts != texts_of(train_state):
        raise UserError(
            f"{trained} a text that has changed since: a file is new, gone or another one",
            "put the text back as it was, or begin anew with another name=",
        )
    if progress.tokenizer and progress.tokenizer != tokenizer_of(train_state):
        raise UserError(
            f"{trained} tokens of a tokenizer that has changed since",
            "put it back as it was (WordPiece, made again, is another), or begin anew with another "
            "name=",
        )


def check_resumable(train_state: TrainState, progress: checkpoint.Progress) -> None:
    check_world(train_state, progress)
    if progress.step > train_state.total_steps:
        raise UserError(
            f"the checkpoint stands at step {progress.step}, "
            f"the run ends at {train_state.total_steps}",
            "raise training.steps, or give the run another name=",
        )
