"""`atoll submit`: compose, check, write the run folder, hand it to the scheduler or run it here."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from atoll import run_dir
from atoll.cluster import before_queue, limits, slurm, then
from atoll.cluster.facility_checks import unknown_network
from atoll.cluster.fit import unknown_fit
from atoll.cluster.hand_over import hand_over
from atoll.cluster.job_script import then_head
from atoll.cluster.learning import learn
from atoll.cluster.start import (
    launch_text,
    runs_here,
    start,
    submission,
    write_run_folder,
    write_then,
)
from atoll.cluster.submit_checks import check, check_before_start
from atoll.commands import CommandParser
from atoll.config.compose import Composition, compose_all, counted, overrides_parser
from atoll.errors import UserError, printable
from atoll.health.exclusions import excluded
from atoll.images.build import made_of_others
from atoll.settings import Run

ABOUT = """\
Compose a run, check it, write its folder, and queue it; without a scheduler it runs here."""
EVALUATE = """\
Perplexity (task=causal_lm) or the metrics of the data set (task=classification) of
model.source=FOLDER on the held-out part of data=NAME, anywhere a run may go. The last line of the
run's metrics.jsonl holds them.
`atoll evaluate WHERE --tasks NAMES`: the scores of tasks, here; `atoll scores --help` says more."""
NO_STEPS = ["training.steps=0", "training.epochs=null"]


def main(argv: list[str]) -> int:
    """Submit one run, or with --multirun one for each combination."""
    arguments = _parser("submit", ABOUT).read(argv)
    return _submit(arguments, arguments.overrides)


def evaluate(argv: list[str]) -> int:
    """Submit, or start here, a run that takes no step; with --tasks, score a model here."""
    if any(word.partition("=")[0] == "--tasks" for word in argv):
        command = [sys.executable, "-m", "atoll", "scores", *argv]
        os.execv(command[0], command)  # its libraries are no login node's
    arguments = _parser("evaluate", EVALUATE).read(argv)
    for word in arguments.overrides:
        if word.startswith(("training.steps=", "training.epochs=")):
            raise UserError(
                f"an evaluation takes no steps, and {word} asks for some", "leave it out"
            )
    return _submit(arguments, [*arguments.overrides, *NO_STEPS])


def _parser(command: str, about: str) -> CommandParser:
    parser = overrides_parser(command, about, multirun=True)
    if command == "submit":
        parser.usage = "sbatch/train.sbatch [OPTION …] KEY=VALUE …"
        steps = "what follows the run, in a job that waits for its end: evaluate, report"
        parser.add_argument("--then", metavar="STEPS", help=steps)
        names = "of --then evaluate, of lm-evaluation-harness; default: evaluation.tasks"
        parser.add_argument("--tasks", metavar="NAMES", help=names)
    only_print = "print the commands, write and run nothing"
    here = "run in this allocation (salloc, or inside a job) instead of queueing a job"
    exports = 'print the sbatch flags as exports: eval "$(atoll submit --sbatch-env …)"'
    parser.add_argument("--dry-run", action="store_true", help=only_print)
    parser.add_argument("--here", action="store_true", help=here)
    yes = "queue it without a question (confirm.node_hours)"
    parser.add_argument("--yes", action="store_true", help=yes)
    parser.add_argument("--sbatch-env", action="store_true", help=exports)
    parser.add_argument("--hand-over", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--clone", type=Path, help=argparse.SUPPRESS)  # whose batch file it is
    return parser


def _submit(arguments: argparse.Namespace, overrides: list[str]) -> int:
    environment, here = dict(os.environ), arguments.here
    if here:
        overrides = with_allocated_nodes(overrides, environment)
    compositions = compose_all(overrides, arguments.multirun, clone=arguments.clone)
    steps = then.steps_of(getattr(arguments, "then", None))
    after = [then.scored(c.run, steps, getattr(arguments, "tasks", None)) for c in compositions]
    if arguments.sbatch_env:
        exports = [words for each in compositions for words in slurm.sbatch_exports(each.run)]
        print("\n".join(map(shlex.join, exports)))
        return 0
    refuse = check if arguments.dry_run else check_before_start
    for composition in compositions:
        refuse(composition.run, here, environment)
    if arguments.dry_run:
        _print_dry_runs(compositions, after, steps, here)
        return 0
    for composition, scored in zip(compositions, after, strict=True):
        if line := counted(compositions, composition):
            print(line, file=sys.stderr, flush=True)
        follows, last = (scored, steps), composition is compositions[-1]
        if code := _submit_one(composition, arguments, follows, last, environment):
            return code
    return 0


def _submit_one(
    composition: Composition,
    arguments: argparse.Namespace,
    follows: tuple[Run, Sequence[str]],
    last: bool,
    environment: Mapping[str, str],
) -> int:
    """Say what a run will take, then queue or start it; what came of it."""
    run, here = composition.run, arguments.here
    if run.training.steps == 0:
        print(what_is_evaluated(run), file=sys.stderr, flush=True)
    wait = _predict_and_ask(run, here, arguments.yes, environment)
    if arguments.hand_over and runs_here(run, here):
        folder = write_run_folder(composition, here)
        hand_over(run, arguments.hand_over, folder, write_then(*follows))
    elif code := start(composition, here, last, environment, follows=follows):
        return code
    if wait is not None:
        before_queue.keep_expected_wait(run, wait)
    # once it is queued: what the scheduler refuses is two lines
    if older := made_of_others(run):
        print(f"atoll: {older}", file=sys.stderr)
    print(unknown_fit(run), unknown_network(run), sep="", end="", file=sys.stderr)
    print(_left_out(run), end="", file=sys.stderr)
    return 0


def _print_dry_runs(
    compositions: Sequence[Composition], after: Sequence[Run], steps: Sequence[str], here: bool
) -> None:
    """The commands and scripts of each run, and of what follows it; beside them what it takes."""
    texts = []
    for each, run in zip(compositions, after, strict=True):
        line = counted(compositions, each)
        head = f"# {line}\n" if line else ""
        texts.append(head + dry_run(each.run, here) + _then_dry(run, steps, here))
    _say_predictions(compositions, here)
    print("\n".join(texts), end="")
    told = (note(each.run) for each in compositions for note in (unknown_fit, unknown_network))
    notes = filter(None, told)
    print("".join(f"\n# {note}" for note in notes), end="")


def _say_predictions(compositions: Sequence[Composition], here: bool) -> None:
    """What each run will take, beside its commands."""
    for each in compositions:
        if (text := before_queue.line(each.run)) and not here:
            print(text, file=sys.stderr, flush=True)


def _predict_and_ask(
    run: Run, here: bool, is_said: bool, environment: Mapping[str, str]
) -> float | None:
    """Say what a run will take, and ask where it takes much; the seconds that it may wait."""
    text, wait, hours_left = "" if here else before_queue.line(run), None, None
    if text:
        with suppress(OSError):  # a clone of somebody else, or a full home: the job counts
            learn(run)
        text = before_queue.line(run)
    if text and not runs_here(run, here):
        begin = None
        if run.facility.scheduler == "slurm":
            begin = before_queue.expected_start(submission(run), environment)
        hours_left = before_queue.node_hours_left(run)
        wait = None if begin is None else before_queue.seconds_until(begin)
        text += "" if begin is None else f"; expected to start {begin}"
        text += "" if hours_left is None else f"; {hours_left:,.4g} node-hours left"
    if text:
        print(text, file=sys.stderr, flush=True)
    if not runs_here(run, here):
        before_queue.confirm(run, is_said, hours_left)
    return wait


def dry_run(run: Run, here: bool = False) -> str:
    """The exact commands, as shell text."""
    folder = run_dir.folder(run)
    queue = "" if runs_here(run, here) else shlex.join(submission(run)) + "\n\n"
    path = printable(str(run_dir.launch_script(folder)))  # a comment is one line
    return f"{queue}# {path}\n{launch_text(run, here)}"


def _then_dry(run: Run, steps: Sequence[str], here: bool) -> str:
    """The job that follows a run, and its script, as shell text."""
    if not steps:
        return ""
    folder = run_dir.folder(run)
    script = printable(str(run_dir.then_script(folder)))
    behind = "" if runs_here(run, here) else f"{then.behind(run, folder, 'JOB')}\n\n"
    return f"\n{behind}# {script}\n{then.script(run, folder, steps, then_head(run, folder))}"


def what_is_evaluated(run: Run) -> str:
    """The model and the text of an evaluation; an untrained model is hardly what was wanted."""
    model = run.model.source or f"{run.model.name}, untrained (model.source=FOLDER gives a model)"
    return f"evaluating {model}, on what {run.data.name} holds out"


def _left_out(run: Run) -> str:
    """The nodes that an earlier fault of the run took out of its jobs, for a person."""
    nodes = excluded(run_dir.folder(run))
    file = run_dir.excluded_file(run_dir.folder(run))
    return f"without {', '.join(nodes)}: {file} says why, and how to undo it\n" if nodes else ""


def with_allocated_nodes(overrides: list[str], environment: Mapping[str, str]) -> list[str]:
    """The overrides with the number of nodes this job has, unless they say one themselves."""
    allocated = limits.allocated_nodes(environment)
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    stated = {name: text for name, _, text in pairs if name in ("nodes", "spare_nodes")}
    if allocated is None or "nodes" in stated:
        return overrides
    spare = stated.get("spare_nodes", "0")
    return [*overrides, f"nodes={allocated - int(spare) if spare.isdecimal() else allocated}"]
