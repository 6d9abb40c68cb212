"""`atoll evaluate WHERE --tasks NAMES`: scores of EleutherAI's lm-evaluation-harness, offline."""

import argparse
from pathlib import Path
from typing import Any

from atoll.commands import VerbParser
from atoll.errors import UserError
from atoll.settings import Evaluation
from atoll.train import harness

FILE_NAME = "scores.json"


def main(argv: list[str]) -> int:
    """Score a run, a checkpoint, an export or an adapter; print it, and keep it in scores.json."""
    arguments = _parser().read(argv)
    asked = _asked(arguments)
    out = arguments.out or arguments.where / FILE_NAME
    figures = scores_of(arguments.where, asked)
    harness.write_scores(out, figures, asked)
    print("\n".join([*harness.as_lines(figures), f"in {out}"]))
    return 0


def scores_of(where: Path, asked: Evaluation) -> harness.Figures:
    """The scores of the model of a folder, in this process."""
    manager = harness.tasks_of(asked)
    return harness.figures_of(own_model(where), asked, manager)


def own_model(where: Path) -> Any:
    """The model of a folder, as the harness calls one."""
    from lm_eval.models.huggingface import HFLM

    from atoll.train.generate import run_of, text_generator_of

    generator = text_generator_of(where, run_of(where))
    return HFLM(pretrained=generator.model, tokenizer=generator.tokenizer)


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


def _asked(arguments: argparse.Namespace) -> Evaluation:
    """Raises `UserError` for what cannot be asked for."""
    names = [word.strip() for word in arguments.tasks.split(",") if word.strip()]
    if not names:
        raise UserError(f"--tasks is {arguments.tasks!r}", "name tasks, with commas between")
    for path in (arguments.where, arguments.tasks_folder):
        if path is not None and not path.is_dir():
            raise UserError(f"no such folder: {path}", "check the path")
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit is {arguments.limit}", "give a number above 0")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise UserError(f"--num-fewshot is {arguments.num_fewshot}", "give 0 or more")
    folder = arguments.tasks_folder
    return Evaluation(
        every_steps=0,
        max_samples=None,
        tasks=names,
        tasks_folder=None if folder is None else str(folder.resolve()),
        fewshot=arguments.num_fewshot,
        task_samples=arguments.limit,
    )
