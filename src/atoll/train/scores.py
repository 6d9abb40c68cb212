"""`atoll evaluate WHERE --tasks NAMES`: scores of EleutherAI's lm-evaluation-harness, offline."""

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.commands import VerbParser
from atoll.errors import UserError

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
FILE_NAME = "scores.json"


def main(argv: list[str]) -> int:
    """Score a run, a checkpoint, an export or an adapter; print it, and keep it in scores.json."""
    arguments = _parser().read(argv)
    _check(arguments)
    for name in OFFLINE:  # before the libraries read it: a node has no network
        os.environ[name] = "1"
    manager, names = _tasks(arguments.tasks, arguments.tasks_folder)
    scores = scores_of(arguments.where, manager, names, arguments.num_fewshot, arguments.limit)
    out = arguments.out or arguments.where / FILE_NAME
    run_dir.write_whole(out, json.dumps(scores, indent=1, sort_keys=True) + "\n")
    for task, figures in scores.items():
        for figure, value in figures.items():
            print(f"{task}  {figure}  {value}")
    print(f"in {out}")
    return 0


def _parser() -> VerbParser:
    parser = VerbParser("evaluate", __doc__)
    parser.add_argument("where", type=Path, metavar="WHERE", help="folder of one of these")
    parser.add_argument("--tasks", required=True, metavar="NAMES", help="with commas between")
    parser.add_argument(
        "--tasks-folder", type=Path, metavar="FOLDER", help="task YAMLs of your own, local data"
    )
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="default: as the task says")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many samples of each task")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: WHERE/{FILE_NAME}")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if find_spec("lm_eval") is None:
        raise UserError(
            "there is no lm_eval here, which scores need", "pip install 'atoll[scores]'"
        )
    for path in (arguments.where, arguments.tasks_folder):
        if path is not None and not path.is_dir():
            raise UserError(f"no such folder: {path}", "check the path")
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit is {arguments.limit}", "give a number above 0")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise UserError(f"--num-fewshot is {arguments.num_fewshot}", "give 0 or more")


def _tasks(words: str, folder: Path | None) -> tuple[Any, list[str]]:
    """The harness's tasks, with those of a folder; refuses a name that none of them has."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if folder is None else str(folder))
    names = [word for word in words.split(",") if word]
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        raise UserError(
            f"the harness has no task {', '.join(unknown) or words!r}",
            "`lm-eval ls tasks` lists its own; --tasks-folder=FOLDER adds yours",
        )
    return manager, names


def scores_of(
    where: Path, manager: Any, names: list[str], fewshot: int | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """Task -> figure -> value, as the harness alone gives them for the same model.

    Raises `UserError` where the data of a task are not on this machine.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import get_task_dict

    from atoll.train.generate import run_of, text_generator_of

    try:  # before the model, which takes longer
        get_task_dict(names, manager)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the data of {', '.join(names)} cannot be read offline: {str(error).splitlines()[0]}",
            "fill HF_HOME where there is a network, or name local data: --tasks-folder=FOLDER",
        ) from None
    generator = text_generator_of(where, run_of(where))
    model = HFLM(pretrained=generator.model, tokenizer=generator.tokenizer)
    results = lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, num_fewshot=fewshot, limit=limit
    )
    return {str(task): dict(figures) for task, figures in results["results"].items()}
