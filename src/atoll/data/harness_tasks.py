"""Tasks of EleutherAI's lm-evaluation-harness, and their data, from a bundle where there is one.

`lm_eval` is imported where it is called: it takes seconds, and only those who score have it.
In a bundle, TASKS/DIGEST is what the harness asked `datasets` for, and TASKS/own a folder of tasks.
"""

import importlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from atoll import run_dir
from atoll.errors import UserError, first_line
from atoll.settings import Evaluation

# modules that keep the variable's value of when they were imported -> their name for it
OFFLINE = {"huggingface_hub.constants": "HF_HUB_OFFLINE", "datasets.config": "HF_HUB_OFFLINE"}
LoadDataset = Callable[..., Any]


class HarnessTasks(NamedTuple):
    """The harness's own list of tasks, and the folder of a bundle that their data are read from."""

    manager: Any
    folder: Path | None


def check_installed() -> None:
    """Raises `UserError` where there is no harness."""
    if find_spec("lm_eval") is None:
        raise UserError(
            "there is no lm_eval where the model is, and tasks need it",
            "make setup installs it; with a wheel: pip install 'WHEEL[scores]'",
        )


def tasks_of(asked: Evaluation, folder: Path | None = None) -> HarnessTasks | None:
    """What is asked for, if anything is: tasks that the harness or a folder has, and their data.

    folder: of a bundle. Raises `UserError` for a name that nobody has, and for data that are not on
    this machine.
    """
    if not asked.tasks:
        return None
    check_installed()
    _stay_offline()
    tasks = HarnessTasks(_manager(asked), folder)
    with data_of(tasks), without_warnings():
        _load(tasks.manager, asked.tasks)
    return tasks


def fetch_tasks(asked: Evaluation, folder: Path) -> None:
    """Keep in `folder` all that the tasks read; then nothing else is needed, which is tried."""
    check_installed()
    folder.mkdir(exist_ok=True)
    if asked.tasks_folder is not None:
        shutil.copytree(asked.tasks_folder, run_dir.own_tasks(folder), dirs_exist_ok=True)

    def keep(load: LoadDataset, **what: Any) -> Any:
        data, kept = load(**what), _place(folder, what)
        if not kept.is_dir():
            partial = folder / f".{kept.name}"
            shutil.rmtree(partial, ignore_errors=True)
            data.save_to_disk(partial)
            os.rename(partial, kept)
        return data

    manager = _manager(asked)
    with _loading(keep), without_warnings():
        _load(manager, asked.tasks)
    tasks_of(asked, folder)


@contextmanager
def data_of(tasks: HarnessTasks) -> Iterator[None]:
    """While the harness reads its tasks: data of a bundle are its files, whatever they were."""
    folder = tasks.folder
    if folder is None:
        yield
        return

    def read(_: LoadDataset, **what: Any) -> Any:
        from datasets import load_from_disk

        kept = _place(folder, what)
        if not kept.is_dir():
            raise FileNotFoundError(f"{folder} has no {what['path']} {what.get('name') or ''}")
        return load_from_disk(kept)

    with _loading(read):
        yield


@contextmanager
def without_warnings() -> Iterator[None]:
    """The harness's own are of what we do on purpose, and each rank would print them."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _loading(function: Callable[..., Any]) -> Iterator[None]:
    """The harness has no place of its own for data: what it calls is what is replaced."""
    import datasets

    load = datasets.load_dataset
    datasets.load_dataset = lambda **what: function(load, **what)
    try:
        yield
    finally:
        datasets.load_dataset = load


def _place(folder: Path, what: dict[str, Any]) -> Path:
    return folder / run_dir.digest({name: str(value) for name, value in what.items()})


def _manager(asked: Evaluation) -> Any:
    from lm_eval.tasks import TaskManager

    # to read its own 10,000 files takes seconds
    manager = TaskManager(include_path=asked.tasks_folder, include_defaults=False)
    if not _unknown(manager, asked.tasks):
        return manager
    manager = TaskManager(include_path=asked.tasks_folder)
    if unknown := _unknown(manager, asked.tasks):
        raise UserError(
            f"the harness has no task {', '.join(unknown)}",
            "`lm-eval ls tasks` lists its own; a folder of yours adds others: "
            "--tasks-folder=FOLDER, or evaluation.tasks_folder=FOLDER",
        )
    return manager


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in manager.all_tasks]


def _load(manager: Any, names: Sequence[str]) -> None:
    try:  # before the model, which takes longer
        tasks = manager.load(list(names))["tasks"]
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the data of {', '.join(names)} cannot be read: {first_line(error)}",
            "where there is a network, atoll prepare --into BUNDLE … evaluation.tasks=[…] fetches "
            "them, or name local data in a task of your own",
        ) from None
    unsafe = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise UserError(
            f"{', '.join(unsafe)} runs code that the model writes", "choose another task"
        )


def _stay_offline() -> None:
    """A node has no network, and the libraries would wait for its answer."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    for module, name in OFFLINE.items():
        if module in sys.modules:
            setattr(importlib.import_module(module), name, True)
