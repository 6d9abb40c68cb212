"""`atoll evaluate WHERE --tasks NAMES`: scores of EleutherAI's lm-evaluation-harness, offline."""

import argparse
import os
import socket
from pathlib import Path

import torch
from transformers.utils import logging

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.data.harness_tasks import tasks_of
from atoll.errors import UserError
from atoll.launch import (
    Placement,
    device_index,
    placement_from,
    start_local_ranks,
    threads_per_rank,
    with_port,
)
from atoll.models.text_generator import TextGenerator, memory_in_two_lines
from atoll.settings import Evaluation
from atoll.sharding.process_group import (
    SharedError,
    World,
    beside_each_other,
    run_on_all_ranks,
    say,
)
from atoll.train import harness
from atoll.train.generate import run_of
from atoll.train.sampling import text_generator_of

ON_PROCESSORS = "on the processors it is slow, and ends: CUDA_VISIBLE_DEVICES= atoll evaluate …"


def main(argv: list[str]) -> int:
    """Score a run, a checkpoint, an export or an adapter; print it, and keep it in scores.json."""
    arguments = _parser().read(argv)
    asked = _asked(arguments)
    placement = placement_from(os.environ, socket.gethostname(), None, "")
    if arguments.local_ranks is None:
        return _score(arguments, asked, placement)
    if placement.world_size > 1:
        raise UserError(
            f"--local-ranks={arguments.local_ranks} in a task that is rank {placement.rank} of "
            f"{placement.world_size} already ({placement.source})",
            "leave --local-ranks out",
        )
    with with_port(placement) as placement:
        words = ["scores", *_words(arguments, asked)]
        return start_local_ranks(placement, arguments.local_ranks, words)


def _score(arguments: argparse.Namespace, asked: Evaluation, placement: Placement) -> int:
    """As the one process, or as one of the ranks of a job step."""
    logging.disable_progress_bar()
    if placement.world_size > 1:
        own, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
        torch.set_num_threads(threads_per_rank(placement, own, all_cores, bound=arguments.bound))
    try:
        with beside_each_other(placement, _device(placement)) as world:
            figures = scores_of(arguments.where, asked, world, _bundled(arguments))
            out = arguments.out or run_dir.scores_file(arguments.where)
            if world.rank == 0:
                harness.write_scores(out, figures, asked)
            say(world, "\n".join([*harness.as_lines(figures), f"in {out}"]))
    except SharedError:
        if placement.rank == 0:  # every rank has the same error
            raise
        return 2
    return 0


def _device(placement: Placement) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = device_index(placement.local_rank, placement.local_world_size, count)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def scores_of(
    where: Path, asked: Evaluation, world: World, folder: Path | None = None
) -> harness.Figures:
    """The scores of the model of a folder, on all ranks; folder: a bundle's, of the tasks."""
    tasks = run_on_all_ranks(world, lambda: tasks_of(asked, folder))
    assert tasks is not None
    generator = run_on_all_ranks(world, lambda: _on_device(where, world))
    return harness.figures_of(
        generator.model, generator.tokenizer, asked, tasks, world, ON_PROCESSORS
    )


def _on_device(where: Path, world: World) -> TextGenerator:
    with memory_in_two_lines(f"the model of {where}", ON_PROCESSORS):
        return text_generator_of(where, run_of(where), world.device)


def _parser() -> CommandParser:
    parser = CommandParser("evaluate", __doc__)
    parser.add_argument("where", type=Path, metavar="WHERE", help="folder of one of these")
    parser.add_argument("--tasks", required=True, metavar="NAMES", help="with commas between")
    parser.add_argument(
        "--tasks-folder", type=Path, metavar="FOLDER", help="task YAMLs of your own, local data"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="BUNDLE", help="of atoll prepare, with the tasks' data"
    )
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="default: as the task says")
    parser.add_argument(
        "--local-ranks", type=int, metavar="N", help="start N ranks here; srun starts a job's"
    )
    parser.add_argument(
        "--bound", action="store_true", help="mpiexec has bound each task to cores of its own"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only so many samples of each task")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: WHERE/scores.json")
    return parser


def _asked(arguments: argparse.Namespace) -> Evaluation:
    """Raises `UserError` for what cannot be asked for."""
    names = [word.strip() for word in arguments.tasks.split(",") if word.strip()]
    if not names:
        raise UserError(f"--tasks is {arguments.tasks!r}", "name tasks, with commas between")
    bundled = _bundled(arguments)
    for path in (arguments.where, arguments.tasks_folder, bundled):
        if path is not None and not path.is_dir():
            raise UserError(f"no such folder: {path}", "check the path")
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit is {arguments.limit}", "give a number above 0")
    if arguments.local_ranks is not None and arguments.local_ranks < 1:
        raise UserError(f"--local-ranks is {arguments.local_ranks}", "give 1 or more")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise UserError(f"--num-fewshot is {arguments.num_fewshot}", "give 0 or more")
    folder = arguments.tasks_folder
    if folder is None and bundled is not None and run_dir.own_tasks(bundled).is_dir():
        folder = run_dir.own_tasks(bundled)
    return Evaluation(
        every_steps=0,
        max_samples=None,
        tasks=names,
        tasks_folder=None if folder is None else str(folder.resolve()),
        fewshot=arguments.num_fewshot,
        task_samples=arguments.limit,
    )


def _bundled(arguments: argparse.Namespace) -> Path | None:
    return None if arguments.bundle is None else run_dir.tasks_folder(arguments.bundle)


def _words(arguments: argparse.Namespace, asked: Evaluation) -> list[str]:
    """The command of each local rank."""
    values = {
        "--tasks": ",".join(asked.tasks),
        "--tasks-folder": asked.tasks_folder,
        "--bundle": arguments.bundle,
        "--num-fewshot": asked.fewshot,
        "--limit": asked.task_samples,
        "--out": arguments.out,
    }
    given = [f"{option}={value}" for option, value in values.items() if value is not None]
    return [*given, str(arguments.where)]
