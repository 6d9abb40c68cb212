"""`launch.sh`: all that a job does, in order. Each step may be done again after a requeue."""

import shlex
from pathlib import Path

from atoll import run_dir
from atoll.host import pbs, slurm
from atoll.host.launchers import atoll_command, launch_step
from atoll.settings import Run

HEADER = """#!/bin/bash
# What this run does. Written when it was submitted; started again, it goes on where it stopped.
"""
STRICT = "set -euo pipefail\n"
# A module system greets with unset variables and failing commands, so strictness comes after it.
MODULES = "source /etc/profile\n"
# What a job does that ends with run_dir.RESTART_CODE: its time was over, its state is saved.
AGAIN = {"slurm": slurm.again, "pbs": pbs.again}


def launch_script(run: Run, run_folder: Path, batch_file: Path | None = None) -> str:
    """The text of a run's `launch.sh`; with a `batch_file` its jobs may queue another one."""
    scheduler = run.facility.scheduler
    modules = [["module", "load", name] for name in run.facility.modules]
    again = AGAIN[scheduler](run, run_folder, batch_file) if scheduler in AGAIN else ""
    return (
        HEADER
        + (MODULES + _lines(modules) if modules else "")
        + STRICT
        + again
        + _lines(steps(run, run_folder))
    )


def steps(run: Run, run_folder: Path) -> list[list[str]]:
    """The commands of a job: check the image, prepare the tokens, train, sample, say where."""
    atoll = atoll_command(run)
    return [
        *(["export", f"{name}={text}"] for name, text in run.facility.environment.items()),
        *([["touch", str(run_dir.job_start(run_folder))]] if _has_deadline(run) else []),
        *_image_checks(run, run_folder),
        [*atoll, "tokenize", str(run_folder)],
        launch_step(run, run_folder),
        [*atoll, "generate", str(run_folder)],
        _where_everything_is(run_folder),
    ]


def _lines(commands: list[list[str]]) -> str:
    return "".join(f"{shlex.join(argv)}\n" for argv in commands)


def _has_deadline(run: Run) -> bool:
    """PBS warns nobody before it ends a job: the ranks look at the clock themselves."""
    return run.facility.scheduler == "pbs" and run.facility.walltime_minutes is not None


def _image_checks(run: Run, run_folder: Path) -> list[list[str]]:
    """Signature, then what is inside against this node, before anything else is started."""
    image = run.image
    if image.file is None:
        return []
    key = ["--key", str(image.verify_key), str(image.file)]
    verify = [[run.facility.container, "verify", *key]] if image.verify_key else []
    return [*verify, [*atoll_command(run), "image", "check", str(run_folder)]]


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
