"""`launch.sh`: all that a job does, in order. Each step may be done again after a requeue."""

import shlex
from pathlib import Path

from atoll import run_dir
from atoll.host.launchers import atoll_command, launch_step
from atoll.settings import Run

HEADER = """#!/bin/bash
# What this run does. Written when it was submitted; started again, it goes on where it stopped.
set -euo pipefail
"""


def launch_script(run: Run, run_folder: Path) -> str:
    """The text of a run's `launch.sh`."""
    return HEADER + "".join(f"{shlex.join(argv)}\n" for argv in steps(run, run_folder))


def steps(run: Run, run_folder: Path) -> list[list[str]]:
    """The commands of a job: prepare the tokens, train, sample from the export, say where."""
    atoll = atoll_command(run)
    return [
        *(["export", f"{name}={text}"] for name, text in run.facility.environment.items()),
        [*atoll, "tokenize", str(run_folder)],
        launch_step(run, run_folder),
        [*atoll, "generate", str(run_folder)],
        _where_everything_is(run_folder),
    ]


def _where_everything_is(run_folder: Path) -> list[str]:
    places = {
        "run": run_folder,
        "metrics": run_dir.metrics_file(run_folder),
        "checkpoints": run_dir.checkpoints(run_folder),
        "export": run_dir.export(run_folder),
        "sample": run_dir.sample_file(run_folder),
    }
    words = [str(word) for place in places.items() for word in place]
    return ["printf", "%-12s %s\\n", *words]
