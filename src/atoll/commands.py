"""The commands of `atoll`; run a program, and read the words of a command: one way everywhere."""

import argparse
import difflib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from atoll.errors import UserError
from atoll.examples import examples_of

MISSING = 127  # as a shell says of a program that is not there
TIMED_OUT = 124  # as timeout(1) says

JOBS_OWN = "Called by jobs and campaigns"
# heading -> command -> (module, what it does); its function is `main(argv) -> int`, or named
# after a colon.
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Runs": {
        "submit": ("atoll.cluster.submit", "compose, check, write the run folder, queue or start"),
        "compose": ("atoll.config.compose", "print the resolved run, and where each value is from"),
        "plan": ("atoll.cluster.plan", "what each strategy needs, what fits, and which to take"),
        "status": ("atoll.cluster.listing:status_of", "queued, running, finished, failed and why"),
        "logs": ("atoll.cluster.job_control:logs", "print what a run's last job printed"),
        "cancel": ("atoll.cluster.job_control:cancel", "end the jobs of a run"),
        "report": ("atoll.report.command", "tables of runs: speed, scaling, communication"),
        "diff": ("atoll.cluster.diff", "the settings in which two runs differ"),
        "judge": ("atoll.health.judge", "name who is at fault for the end of a run's last job"),
        "exclusions": ("atoll.health.exclusions", "the nodes a run leaves out, and how to undo it"),
    },
    "Models and data": {
        "evaluate": ("atoll.cluster.submit:evaluate", "perplexity, metrics or scores of any model"),
        "generate": ("atoll.train.generate", "continue a prompt with a run, checkpoint or adapter"),
        "models": ("atoll.train.families", "architectures, and the strategies each can take"),
        "verify": ("atoll.verify.command", "compare a model with what it says made it, offline"),
        "prepare": ("atoll.cluster.prepare", "fetch model and data into one folder that travels"),
    },
    "Facilities": {
        "init": ("atoll.config.working_folder", "write a working folder, for an installed atoll"),
        "list": ("atoll.cluster.listing", "name facilities, models, data, runs, jobs and others"),
        "doctor": ("atoll.cluster.doctor", "check a facility; with --job its devices and links"),
        "rehearse": ("atoll.rehearse.command", "try a job under a facility's constraints, here"),
        "image": ("atoll.images.build", "build, test, sign, verify or inspect a container image"),
        "federate": ("atoll.campaign.coordinator", "train at several facilities, averaged here"),
        "completion": ("atoll.cluster.completion", "what makes bash, zsh or fish complete words"),
    },
    JOBS_OWN: {
        "tokenize": ("atoll.data.tokenize", "turn text into token shards"),
        "launch": ("atoll.launch", "start this task's rank, or this node's ranks, of a run"),
        "go-on": ("atoll.health.go_on", "what a job does after a fault: its shell asks"),
        "over-ssh": ("atoll.launch.over_ssh", "start the ranks of machines without a scheduler"),
        "summary": ("atoll.report.summary", "what a run made, in one box, and its report.html"),
        "scores": ("atoll.train.scores", "evaluate --tasks: the harness's own, in this process"),
        "fetch": ("atoll.models.fetch", "the half of prepare that runs in the image"),
        "round": ("atoll.campaign.round", "one step of a campaign's round, for its engine"),
        "site": ("atoll.campaign.site", "one round at one facility, a step further"),
        "aggregate": ("atoll.federation.aggregate_command", "the next global model from updates"),
        "make-delta": ("atoll.federation.make_delta", "a run's update to its global model"),
        "apply-delta": ("atoll.federation.apply_delta", "a facility's copy of the global model"),
        "merge-global": ("atoll.federation.merge_global", "averaged fragments into own weights"),
        "untrained": ("atoll.train.untrained", "the model a run would begin with"),
        "adapter": ("atoll.train.first_adapter", "a run's first adapter, or its base's digest"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class Finished(NamedTuple):
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of its errors, else of its output, else its exit code."""
        lines = [line.strip() for line in f"{self.stdout}\n{self.stderr}".splitlines()]
        return next((line for line in reversed(lines) if line), f"exit code {self.returncode}")


def run_command(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    input_text: str | None = None,
) -> Finished:
    """Run a program to its end; one that is missing or too slow ends with a shell's code for it."""
    try:
        done = subprocess.run(
            list(argv),
            env=None if environment is None else dict(environment),
            timeout=timeout_seconds,
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            capture_output=True,
            encoding="utf-8",  # whatever the locale: what is signed is bytes
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return Finished(TIMED_OUT, "", f"{argv[0]} gave no answer in {timeout_seconds:g} s")
    except OSError as error:
        return Finished(MISSING, "", f"cannot start {argv[0]}: {error.strerror}")
    return Finished(done.returncode, done.stdout, done.stderr)


def close_stdin() -> None:
    """Nobody is asked: a library that would ask reads the end of the file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def json_object(text: str) -> dict[str, Any]:
    """The kind of an option that is JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON object")
    return value


class CommandParser(argparse.ArgumentParser):
    """argparse whose complaints are two lines: what was found, and a "did you mean"."""

    def __init__(
        self, command: str, about: str | None, replaced: Mapping[str, str] | None = None
    ) -> None:
        """replaced: flags of another program that people type -> what does it here."""
        super().__init__(
            prog=f"atoll {command}",
            description=about,
            epilog=examples_of(command),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.replaced = replaced or {}

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}", f"`{self.prog} --help` lists what it takes")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The words of a command, options and the others in any order.

        Raises `UserError` for an option the command does not have.
        """
        options = [name for action in self._actions for name in action.option_strings]
        for word in argv:
            option = word.partition("=")[0]
            if option in self.replaced:
                raise UserError(f"{option} is a flag of Hydra's own", self.replaced[option])
            if option.startswith("--") and option != "--" and option not in options:
                near = difflib.get_close_matches(option, options, n=1)
                choices = f"choose from: {', '.join(sorted(options))}"
                raise UserError(
                    f"unknown option: {option}", f"did you mean {near[0]}?" if near else choices
                )
        return self.parse_intermixed_args(list(argv))
