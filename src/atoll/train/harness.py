"""Figures of EleutherAI's lm-evaluation-harness, as numbers.

`lm_eval` is imported where it is called: it takes seconds, and only those who score have it.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll import run_dir
from atoll.data.harness_tasks import HarnessTasks, data_of, without_warnings
from atoll.settings import Evaluation
from atoll.sharding.process_group import World, of_first

Figures = dict[str, dict[str, float]]  # task -> figure -> value


def figures_of(
    model: Any,
    tokenizer: Any,
    asked: Evaluation,
    tasks: HarnessTasks,
    world: World,
    hint: str,
    beat: Callable[[], None] = lambda: None,
) -> Figures:
    """What the harness alone gives for a model that each rank has whole, to the last digit.

    beat: called before each pass of the model. Raises `SharedError`, with the hint, where one rank
    has no room for a pass.
    """
    from lm_eval import simple_evaluate

    from atoll.train.harness_model import ModelOnRanks

    with _own_random_numbers(), data_of(tasks), without_warnings(), _quietly():
        results = simple_evaluate(
            model=ModelOnRanks(model, tokenizer, world, beat, hint),
            tasks=list(asked.tasks),
            task_manager=tasks.manager,
            num_fewshot=asked.fewshot,
            limit=asked.task_samples,
            log_samples=False,
            # it starts as many processes as there are cores; the first rank's figures count
            **({} if world.rank == 0 else {"bootstrap_iters": 0}),
        )
    # it gives nothing to a rank that is not the first of its node
    named = {} if results is None else results["results"]
    figures: Figures = of_first(world, {str(name): _numbers(named[name]) for name in named})
    return figures


def write_scores(file: Path, figures: Figures, asked: Evaluation) -> None:
    """The figures, with what they depend on beside the model."""
    content = {
        "lm_eval": version("lm_eval"),
        "fewshot": asked.fewshot,  # null: as each task says
        "samples": asked.task_samples,  # null: all
        "tasks": figures,
    }
    run_dir.write_whole(file, json.dumps(content, indent=1, sort_keys=True) + "\n")


def as_lines(figures: Figures) -> list[str]:
    """Task, figure and value, a line each."""
    return [f"{task}  {name}  {value}" for task in figures for name, value in figures[task].items()]


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The figures among what the harness says of a task: `acc,none` is acc, without a filter."""
    return {
        name.removesuffix(",none"): value
        for name, value in values.items()
        if "," in name and isinstance(value, int | float) and math.isfinite(value)
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Each rank would draw bars, and git complain of a folder that is no clone."""
    from lm_eval import evaluator
    from lm_eval.api import task

    bar, commit = task.tqdm, evaluator.get_git_commit_hash
    task.tqdm, evaluator.get_git_commit_hash = (lambda each, **_: each), (lambda: None)
    try:
        yield
    finally:
        task.tqdm, evaluator.get_git_commit_hash = bar, commit


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """The harness sets seeds, which are a run's as well: they go on from where they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
