"""`atoll submit`: compose, check, write the run folder, hand it to the scheduler or run it here."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from atoll import run_dir
from atoll.cluster import before_queue, limits, pbs, slurm, then
from atoll.cluster.device_here import check_device
from atoll.cluster.fit import check_fit, unknown_fit
from atoll.cluster.hand_over import hand_over
from atoll.cluster.job_script import around_job, launch_script, then_head
from atoll.cluster.learning import learn
from atoll.cluster.lease import lease_of
from atoll.cluster.scheduler import queued, without_outer_job
from atoll.cluster.summary import is_finished, summary
from atoll.commands import CommandParser
from atoll.config.compose import Composition, compose_all, config_tree, counted, overrides_parser
from atoll.config.identity import check_same_run
from atoll.errors import UserError, printable
from atoll.health.exclusions import excluded
from atoll.images.check import check_image
from atoll.settings import Data, Run
from atoll.settings.named_files import named_files, refuse_no_text

ABOUT = """\
Compose a run, check it, write its folder, and queue it; without a scheduler it runs here."""
EVALUATE = """\
Perplexity (task=causal_lm) or the metrics of the data set (task=classification) of
model.source=FOLDER on the held-out part of data=NAME, anywhere a run may go. The last line of the
run's metrics.jsonl holds them.
`atoll evaluate WHERE --tasks NAMES`: the scores of tasks, here; `atoll scores --help` says more."""
NO_STEPS = ["training.steps=0", "training.epochs=null"]
# scheduler -> the command that queues a run
SUBMISSIONS = {"slurm": slurm.sbatch_argv, "pbs": pbs.qsub_argv}


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
    for composition in compositions:
        check(composition.run, here, environment)
        if not arguments.dry_run:  # which may be typed before there is an image
            check_device(composition.run)
            check_image(composition.run)
            check_environment(composition.run)
            check_data(composition.run)
    if arguments.dry_run:
        heads = [
            f"# {line}\n" if (line := counted(compositions, each)) else "" for each in compositions
        ]
        texts = [
            dry_run(each.run, here) + _then_dry(run, steps, here)
            for each, run in zip(compositions, after, strict=True)
        ]
        _say_predictions(compositions, here)
        print("\n".join(head + text for head, text in zip(heads, texts, strict=True)), end="")
        print(
            "".join(f"\n# {note}" for each in compositions if (note := unknown_fit(each.run))),
            end="",
        )
        return 0
    for composition, scored in zip(compositions, after, strict=True):
        last = composition is compositions[-1]
        if line := counted(compositions, composition):
            print(line, file=sys.stderr, flush=True)
        if composition.run.training.steps == 0:
            print(what_is_evaluated(composition.run), file=sys.stderr, flush=True)
        wait = _predict_and_ask(composition.run, here, arguments.yes, environment)
        if arguments.hand_over and _runs_here(composition.run, here):
            folder = write_run_folder(composition, here)
            hand_over(composition.run, arguments.hand_over, folder, _write_then(scored, steps))
        elif code := start(composition, here, last, environment, follows=(scored, steps)):
            return code
        if wait is not None:
            before_queue.keep_expected_wait(composition.run, wait)
        # once it is queued: what the scheduler refuses is two lines
        print(unknown_fit(composition.run), end="", file=sys.stderr)
        print(_left_out(composition.run), end="", file=sys.stderr)
    return 0


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
        learn(run)
        text = before_queue.line(run)
    if text and not _runs_here(run, here):
        begin = None
        if run.facility.scheduler == "slurm":
            begin = before_queue.expected_start(_submission(run), environment)
        hours_left = before_queue.node_hours_left(run)
        wait = None if begin is None else before_queue.seconds_until(begin)
        text += "" if begin is None else f"; expected to start {begin}"
        text += "" if hours_left is None else f"; {hours_left:,.4g} node-hours left"
    if text:
        print(text, file=sys.stderr, flush=True)
    if not _runs_here(run, here):
        before_queue.confirm(run, is_said, hours_left)
    return wait


def dry_run(run: Run, here: bool = False) -> str:
    """The exact commands, as shell text."""
    folder = run_dir.folder(run)
    queue = "" if _runs_here(run, here) else shlex.join(_submission(run)) + "\n\n"
    path = printable(str(run_dir.launch_script(folder)))  # a comment is one line
    return f"{queue}# {path}\n{_script(run, here)}"


def _then_dry(run: Run, steps: Sequence[str], here: bool) -> str:
    """The job that follows a run, and its script, as shell text."""
    if not steps:
        return ""
    folder = run_dir.folder(run)
    script = printable(str(run_dir.then_script(folder)))
    behind = "" if _runs_here(run, here) else f"{then.behind(run, folder, 'JOB')}\n\n"
    return f"\n{behind}# {script}\n{then.script(run, folder, steps, then_head(run, folder))}"


def _write_then(run: Run, steps: Sequence[str]) -> Path | None:
    """Write what follows a run; None where nothing does."""
    folder = run_dir.folder(run)
    if not steps:
        return None
    text = then.script(run, folder, steps, then_head(run, folder))
    run_dir.write_whole(run_dir.then_script(folder), text)
    return run_dir.then_script(folder)


def what_is_evaluated(run: Run) -> str:
    """The model and the text of an evaluation; an untrained model is hardly what was wanted."""
    model = run.model.source or f"{run.model.name}, untrained (model.source=FOLDER gives a model)"
    return f"evaluating {model}, on what {run.data.name} holds out"


def _left_out(run: Run) -> str:
    """The nodes that an earlier fault of the run took out of its jobs, for a person."""
    nodes = excluded(run_dir.folder(run))
    file = run_dir.excluded_file(run_dir.folder(run))
    return f"without {', '.join(nodes)}: {file} says why, and how to undo it\n" if nodes else ""


def _discard(folder: Path) -> None:
    """Leave no trace of a refused run; whatever else is in its folder stays."""
    kept = (run_dir.launch_script, run_dir.job_script, run_dir.settings_file)
    for path in (*kept, run_dir.prediction_file):
        path(folder).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def with_allocated_nodes(overrides: list[str], environment: Mapping[str, str]) -> list[str]:
    """The overrides with the number of nodes this job has, unless they say one themselves."""
    allocated = limits.allocated_nodes(environment)
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    stated = {name: text for name, _, text in pairs if name in ("nodes", "spare_nodes")}
    if allocated is None or "nodes" in stated:
        return overrides
    spare = stated.get("spare_nodes", "0")
    return [*overrides, f"nodes={allocated - int(spare) if spare.isdecimal() else allocated}"]


def check(run: Run, here: bool, environment: Mapping[str, str]) -> None:
    """Refuse what the facility, its devices, the allocation or the run's own past do not allow."""
    limits.check_supported(run)
    limits.check_nodes(run)
    if here:
        limits.check_allocation(run, environment)
    elif run.facility.scheduler != "none":
        limits.check_queue(run)
    if _runs_here(run, here):
        check_source(run)
    check_fit(run)
    check_same_run(run, run_dir.folder(run))


def check_source(run: Run) -> None:
    """Refuse a folder that is not on this machine, where the run takes place on it."""
    source = run.model.source
    if source is not None and source.startswith("/"):
        if not Path(source).is_dir():
            raise UserError(f"no such folder: model.source={source}", "check the path")
        if not (Path(source) / "config.json").is_file():
            raise UserError(
                f"no config.json in model.source={source}",
                "give the folder of a Hugging Face model",
            )
    tasks = run.evaluation.tasks_folder
    if tasks is not None and not Path(tasks).is_dir():
        raise UserError(f"no such folder: evaluation.tasks_folder={tasks}", "check the path")
    for name in ("initial_load_path", "optimizer_load_path"):
        origin = getattr(run.checkpoint, name)
        if origin is not None and not origin.is_dir():
            raise UserError(f"no such folder: checkpoint.{name}={origin}", "check the path")


def check_data(run: Run) -> None:
    """Refuse text files that are not there before a job waits for them, or holds none.

    Where their tokens are made already, the text may have been put away.
    """
    if run.folders.bundle is not None or (run_dir.prepared(run) / "manifest.json").is_file():
        return
    for data in run.data.each:
        setting = f"source {data.name}: files" if run.data.sources else "data.files"
        _check_text(data, setting)


def _check_text(data: Data, files: str) -> None:
    """files: what the setting of its files is called."""
    if data.source == "hub":
        return
    if data.source == "python_stdlib":
        if named := next((entry for entry in data.files if Path(entry).is_file()), None):
            raise UserError(
                f"{files} names {named}, and data={data.name} reads Python's own sources",
                f"for text of your own: data=text_files data.files={named}",
            )
        return
    for setting, entries in (
        (files, data.files),
        (files.replace("files", "validation.files"), data.validation.files),
    ):
        if entries:
            paths = [path for entry in entries for _, path in named_files(entry, setting)]
            refuse_no_text(paths, setting)


def check_environment(run: Run) -> None:
    """Refuse a job in an environment that is a login node's side alone."""
    if run.image.file is None and find_spec("torch") is None:
        raise UserError(
            f"{sys.executable} has no torch: it composes and submits, and cannot train",
            "choose an image, as image=cpu, or install the rest: make setup",
        )


def write_run_folder(
    composition: Composition, here: bool = False, entrypoint: str | None = None
) -> Path:
    """Write all that a job reads, then `run.yaml`, and return the run's folder."""
    folder = run_dir.folder(composition.run)
    script = _script(composition.run, here, entrypoint)
    prepared = composition.run.folders.prepared
    try:
        prepared.mkdir(parents=True, exist_ok=True)  # a bind needs it
    except OSError as error:
        found = f"cannot make {prepared}: {error.strerror}"
        raise UserError(found, "give another place: folders.prepared=FOLDER") from None
    try:
        run_dir.write_whole(run_dir.job_script(folder), around_job())
        run_dir.write_whole(run_dir.launch_script(folder), script)
        if entrypoint is None:
            before_queue.keep_prediction(composition.run)
        run_dir.write_whole(run_dir.settings_file(folder), composition.as_yaml())
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _unusable(folder: Path, error: OSError) -> UserError:
    found = f"cannot write the run folder {folder}: {error.strerror}"
    return UserError(found, "give another place: folders.runs=FOLDER")


def start(
    composition: Composition,
    here: bool,
    last: bool,
    environment: Mapping[str, str],
    entrypoint: str | None = None,
    follows: tuple[Run, Sequence[str]] | None = None,
) -> int:
    """Queue a run, or run it here; `last`: become it, so that its signals and code are ours.

    entrypoint: `module:function` for all ranks to call, in place of the whole training.
    follows: what comes behind it, and the run with the tasks that this scores.
    """
    run = composition.run
    if not _runs_here(run, here):
        job = _queue(composition, environment, entrypoint)
        print(f"job {job}: {run_dir.folder(run)}", flush=True)
        if follows is not None and _write_then(*follows):
            print(then.queue_behind(follows[0], run_dir.folder(run), job, environment), flush=True)
        return 0
    command = ["bash", str(run_dir.launch_script(run_dir.folder(run)))]
    if run.facility.scheduler == "none":
        _refuse_second(run)
        if entrypoint is None and is_finished(run):
            print(_made(run))
            script = None if follows is None else _write_then(*follows)
            return subprocess.run(["bash", str(script)]).returncode if script else 0
    folder = write_run_folder(composition, here, entrypoint)
    print(f"run {run.name} in {folder}", flush=True)
    if follows is not None and (script := _write_then(*follows)):
        command = ["bash", "-c", 'bash "$0" && exec bash "$1"', command[1], str(script)]
    if last:
        os.execvp(command[0], command)  # signals reach the run, its exit code is ours
    return subprocess.run(command).returncode


def _made(run: Run) -> str:
    """What a finished run made, with its sample."""
    folder = run_dir.folder(run)
    sample = run_dir.sample_file(folder)
    in_box = run_dir.untrained_sample_file(folder).is_file()
    text = f"{sample.read_text()}\n" if sample.is_file() and not in_box else ""
    return f"run {run.name} is finished; here is what it made\n\n{text}{summary(folder)}"


def _queue(composition: Composition, environment: Mapping[str, str], entrypoint: str | None) -> str:
    run = composition.run
    known = run_dir.folder(run).exists()
    folder = write_run_folder(composition, entrypoint=entrypoint)
    run_dir.restarts_file(folder).unlink(missing_ok=True)  # a person starts the count anew
    try:
        job = queued(_submission(run), without_outer_job(environment))
    except UserError as error:
        if not known:  # nothing that its corrected form would trip over
            _discard(folder)
        if nodes := excluded(folder):  # which may be what leaves too few
            undo = f"without {', '.join(nodes)} (atoll exclusions {folder} --take-back NODE)"
            raise UserError(error.found, f"{error.hint}; {undo}") from error
        raise
    with open(run_dir.jobs_file(folder), "a") as file:  # for `atoll status`
        file.write(f"{run.facility.scheduler} {job}\n")
    return job


def _submission(run: Run) -> list[str]:
    argv = SUBMISSIONS[run.facility.scheduler]
    return argv(run, _batch_file(), run_dir.folder(run))


def _script(run: Run, here: bool, entrypoint: str | None = None) -> str:
    """`launch.sh`; a job that a person queued by hand is theirs to queue again."""
    batch_file = None if here else _batch_file()
    return launch_script(run, run_dir.folder(run), batch_file, entrypoint)


def _batch_file() -> Path:
    return config_tree().parent / "sbatch" / "train.sbatch"


def _runs_here(run: Run, here: bool) -> bool:
    return here or run.facility.scheduler == "none"


def _refuse_second(run: Run) -> None:
    """Refuse to start a run that goes on; launch.sh, which takes the lease, looks again."""
    folder = run_dir.folder(run)
    lease = lease_of(folder)
    if lease is not None and lease.alive:
        raise UserError(
            f"run {run.name} is running already in {folder}: process {lease.job} on {lease.node}",
            "wait for it or end it, or give this one another name: name=NAME",
        )
