"""The command line: a verb is a module, imported only when it is typed."""

import importlib
import os
import sys

from atoll.commands import close_stdin
from atoll.errors import UserError

# verb -> (module, what it does); its function is `main(argv) -> int`, or named after a colon.
VERBS = {
    "compose": ("atoll.config.compose", "print the resolved run and where each value came from"),
    "plan": ("atoll.cluster.plan", "what each strategy needs, what fits, and which one to take"),
    "submit": ("atoll.cluster.submit", "compose, check, write the run folder, call the scheduler"),
    "status": ("atoll.cluster.status", "say of a run: queued, running, finished, failed and why"),
    "list": ("atoll.cluster.listing", "name facilities, models, data, runs, jobs and others"),
    "models": ("atoll.train.families", "architectures, and the strategies each can take"),
    "logs": ("atoll.cluster.job_control:logs", "print what a run's last job printed"),
    "cancel": ("atoll.cluster.job_control:cancel", "end the jobs of a run"),
    "diff": ("atoll.config.diff", "the settings in which two runs differ"),
    "judge": ("atoll.health.judge", "name who is at fault for the end of a run's last job"),
    "exclusions": ("atoll.health.exclusions", "the nodes a run leaves out, and how to undo that"),
    "report": ("atoll.report.command", "tables of runs: speed, scaling, communication"),
    "doctor": ("atoll.cluster.doctor", "check a facility, and with --job its devices and links"),
    "rehearse": (
        "atoll.rehearse.command",
        "try a job under a facility's constraints, on this machine",
    ),
    "image": ("atoll.images.build", "build, test, sign, verify or inspect a container image"),
    "prepare": ("atoll.cluster.prepare", "fetch model and data into one folder that travels"),
    "fetch": ("atoll.models.fetch", "the half of prepare that runs in the image"),
    "evaluate": ("atoll.cluster.submit:evaluate", "perplexity or metrics of a model, on any data"),
    "tokenize": ("atoll.data.tokenize", "turn text into token shards"),
    "launch": ("atoll.launch", "start this task's rank, or this node's ranks, of a run"),
    "go-on": ("atoll.health.go_on", "what a job does after a fault: its shell asks"),
    "over-ssh": ("atoll.launch.over_ssh", "start the ranks of machines without a scheduler"),
    "federate": ("atoll.campaign.coordinator", "rounds of training at facilities, averaged here"),
    "round": ("atoll.campaign.round", "one step of a campaign's round, for its engine"),
    "site": ("atoll.campaign.site", "one round at one facility, a step further"),
    "aggregate": ("atoll.federation.aggregate", "the next global model from updates"),
    "make-delta": ("atoll.federation.make_delta", "a run's update to its global model"),
    "untrained": ("atoll.train.untrained", "the model a run would begin with, and nothing else"),
    "apply-delta": ("atoll.federation.apply_delta", "a facility's copy of the global model"),
    "generate": ("atoll.train.generate", "continue a prompt with a run, checkpoint or adapter"),
}

LOADS = {"tokenize", "fetch", "untrained", "generate"}  # of others, with libraries that may ask

# what a verb was called before -> its name
RENAMED = {"difference": "make-delta", "rebase": "apply-delta"}


def main(argv: list[str]) -> int:
    """Run one verb; a `UserError` becomes two lines on stderr and exit code 2."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        print(f"atoll {importlib.import_module('importlib.metadata').version('atoll')}")
        return 0
    try:
        if argv[0] in RENAMED:
            raise UserError(f"unknown verb: {argv[0]}", f"it is called {RENAMED[argv[0]]} now")
        if argv[0] not in VERBS:
            raise UserError(f"unknown verb: {argv[0]}", f"choose from: {', '.join(VERBS)}")
        module, _, function = VERBS[argv[0]][0].partition(":")
        code = getattr(importlib.import_module(module), function or "main")(argv[1:])
    except UserError as error:
        sys.stderr.write(error.shown())
        return 2
    except BrokenPipeError:  # whoever reads our words has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(code or 0)


def process() -> None:
    """A verb in a process of its own: what it writes is for nobody else to change."""
    os.umask(os.umask(0o022) | 0o002)
    if sys.argv[1:2] and sys.argv[1] in LOADS:
        close_stdin()
    sys.exit(main(sys.argv[1:]))


def entry() -> None:
    """The `atoll` of an environment: a PYTHONPATH, as a site's modules set it, shadows nothing."""
    foreign = {os.path.abspath(path) for path in os.environ.pop("PYTHONPATH", "").split(":")}
    sys.path[:] = [path for path in sys.path if path not in foreign]
    process()


def _usage() -> str:
    lines = [f"  {verb:11} {about}" for verb, (_, about) in VERBS.items()]
    return "\n".join(["usage: atoll VERB …", "", *lines])


if __name__ == "__main__":
    process()
