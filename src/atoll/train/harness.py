"""EleutherAI's lm-evaluation-harness as we call it: offline, tasks by name, figures as numbers.

`lm_eval` is imported where it is called: it takes seconds, and only those who score have it.
"""

import importlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll import run_dir
from atoll.errors import UserError, first_line
from atoll.settings import Evaluation
from atoll.sharding.process_group import World

Figures = dict[str, dict[str, float]]  # task -> figure -> value

# modules that keep the variable's value of when they were imported -> their name for it
OFFLINE = {"huggingface_hub.constants": "HF_HUB_OFFLINE", "datasets.config": "HF_HUB_OFFLINE"}


def check_installed() -> None:
    """Raises `UserError` where there is no harness."""
    if find_spec("lm_eval") is None:
        raise UserError(
            "there is no lm_eval where the model is, and tasks need it",
            "pip install 'atoll[scores]'",
        )


def tasks_of(asked: Evaluation) -> Any:
    """The harness's tasks, with those of a folder; all that is asked for is there, if anything is.

    Raises `UserError` for a name that none of them has, and for data that are not on this machine.
    """
    if not asked.tasks:
        return None
    check_installed()
    _stay_offline()
    from lm_eval.tasks import TaskManager

    # to read its own 10,000 files takes seconds
    manager = TaskManager(include_path=asked.tasks_folder, include_defaults=False)
    if not _unknown(manager, asked.tasks):
        return _with_data(manager, asked.tasks)
    manager = TaskManager(include_path=asked.tasks_folder)
    if unknown := _unknown(manager, asked.tasks):
        raise UserError(
            f"the harness has no task {', '.join(unknown)}",
            "`lm-eval ls tasks` lists its own; a folder of yours adds others: "
            "--tasks-folder=FOLDER, or evaluation.tasks_folder=FOLDER",
        )
    return _with_data(manager, asked.tasks)


def figures_of(
    model: Any,
    tokenizer: Any,
    asked: Evaluation,
    manager: Any,
    world: World,
    beat: Callable[[], None] = lambda: None,
) -> Figures:
    """What the harness alone gives for a model that each rank has whole, to the last digit.

    beat: called before each pass of the model.
    """
    from lm_eval import simple_evaluate

    from atoll.train.harness_model import ModelOnRanks

    with _own_random_numbers():
        results = simple_evaluate(
            model=ModelOnRanks(model, tokenizer, world, beat),
            tasks=list(asked.tasks),
            task_manager=manager,
            num_fewshot=asked.fewshot,
            limit=asked.task_samples,
            log_samples=False,
            # it starts as many processes as there are cores; the first rank's figures count
            **({} if world.rank == 0 else {"bootstrap_iters": 0}),
        )
    return {str(task): _numbers(values) for task, values in results["results"].items()}


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


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in manager.all_tasks]


def _with_data(manager: Any, names: Sequence[str]) -> Any:
    try:  # before the model, which takes longer
        tasks = manager.load(list(names))["tasks"]
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the data of {', '.join(names)} cannot be read offline: {first_line(error)}",
            "fill HF_HOME where there is a network, or name local data in a task of your own",
        ) from None
    unsafe = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise UserError(
            f"{', '.join(unsafe)} runs code that the model writes", "choose another task"
        )
    return manager


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """The harness sets seeds, which are a run's as well: they go on from where they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def _stay_offline() -> None:
    """A node has no network, and the libraries would wait for its answer."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    for module, name in OFFLINE.items():
        if module in sys.modules:
            setattr(importlib.import_module(module), name, True)
