"""Scores of a run's model as it is at a step: exported, read by every rank, asked by all."""

import shutil
from pathlib import Path

from transformers.utils import logging

from atoll import run_dir
from atoll.models.text_generator import NO_ROOM, TextGenerator, from_folder, memory_in_two_lines
from atoll.sharding.process_group import SharedError, World, run_on_all_ranks, say
from atoll.train import harness
from atoll.train.assemble import TrainState
from atoll.train.export_model import write_export

HINT = "evaluation.tasks=[]"


def run_scores(train_state: TrainState, step: int) -> dict[str, float]:
    """`TASK/FIGURE` -> value, of the tasks that a run's evaluations ask for; on every rank.

    Each rank holds the whole model, in the export's type, for as long as it takes. Where one has no
    room for it the run goes on without scores, but for step 0: nothing is trained yet.
    """
    if train_state.scored_tasks is None:
        return {}
    logging.disable_progress_bar()  # of each rank, as it reads
    world, folder = train_state.world, run_dir.scored_model(train_state.run_folder)
    try:
        figures = _figures(train_state, folder)
    except SharedError as error:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if step == 0 or not error.found.startswith(NO_ROOM):
            raise
        say(world, f"no scores at step {step}: {error.found}")
        return {}
    return {f"{task}/{name}": value for task in figures for name, value in figures[task].items()}


def _figures(train_state: TrainState, folder: Path) -> harness.Figures:
    run, world = train_state.run, train_state.world
    write_export(train_state, folder)
    generator = run_on_all_ranks(world, lambda: _on_device(folder, world))
    run_on_all_ranks(world, lambda: shutil.rmtree(folder) if world.rank == 0 else None)
    return harness.figures_of(
        generator.model,
        generator.tokenizer,
        run.evaluation,
        train_state.scored_tasks,
        world,
        HINT,
        lambda: train_state.heartbeat.at("evaluation"),
    )


def _on_device(folder: Path, world: World) -> TextGenerator:
    with memory_in_two_lines("the whole model beside this rank's part", HINT):
        return from_folder(folder, world.device)
