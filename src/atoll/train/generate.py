"""`atoll generate WHERE`: continue prompts with a run, a checkpoint, an export or an adapter."""

import argparse
from pathlib import Path

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.errors import UserError
from atoll.imports import paused_garbage_collection
from atoll.settings import Generation, Run, load_run


def main(argv: list[str]) -> int:
    """Print a sampled text as it comes; of a whole run, keep it in the run folder."""
    arguments = _parser().read(argv)
    if not arguments.where.exists():
        raise UserError(
            f"no such folder: {arguments.where}",
            "give that of a run, a checkpoint, an export or an adapter, as runs/NAME",
        )
    run = run_of(arguments.where)
    settings = _settings(run, arguments)
    prompts = _prompts(arguments, settings)
    with paused_garbage_collection():
        from atoll.train.sampling import sample  # with torch: no mistake and no --help waits for it

    seed = arguments.seed if arguments.seed is not None else (run.seed if run else 0)
    sample(arguments, run, prompts, settings, seed)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("generate", __doc__)
    parser.add_argument("where", type=Path, metavar="WHERE", help="folder of one of these")
    parser.add_argument("--prompt", help="default: generation.prompt of the run")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines: prompt and text")
    for option, kind in (("--max-new-tokens", int), ("--temperature", float)):
        name = f"generation.{option[2:].replace('-', '_')}"
        parser.add_argument(option, type=kind, metavar="N", help=f"default: {name} of the run")
    parser.add_argument("--seed", type=int, metavar="N", help="default: that of the run")
    parser.add_argument(
        "--chat", action="store_true", help="prompts are what a user says; as data.format=chat"
    )
    parser.add_argument(
        "--both", action="store_true", help="of a run: also before its training; kept, not printed"
    )
    return parser


def run_of(where: Path) -> Run | None:
    """The run that a folder belongs to: its own, or the one that it lies in."""
    for folder in (where, *where.resolve().parents[:3]):
        if run_dir.settings_file(folder).is_file():
            return load_run(run_dir.settings_file(folder))
    return None


def _prompts(arguments: argparse.Namespace, settings: Generation) -> list[str]:
    if arguments.prompts is not None:
        return _lines(arguments.prompts)
    prompt = settings.prompt if arguments.prompt is None else arguments.prompt
    if prompt is None:
        raise UserError(
            f"{arguments.where} lies in no run folder that has a prompt",
            "give one: --prompt TEXT, or --prompts FILE",
        )
    return [prompt]


def _settings(run: Run | None, arguments: argparse.Namespace) -> Generation:
    settings = run.generation if run is not None else Generation(prompt=None)
    given = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature}
    for name, value in given.items():
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}", "give a number above 0")
    return settings.model_copy(update={n: v for n, v in given.items() if v is not None})


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check the path") from None
    if not lines:
        raise UserError(f"{path} holds no prompt", "write one a line")
    return lines
