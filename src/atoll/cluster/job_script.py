"""`launch.sh`: all that a job does, in order. Each step may be done again after a requeue."""

import shlex
from pathlib import Path

from atoll import run_dir
from atoll.cluster import pbs, slurm
from atoll.cluster.launchers import SAFE_PATH, atoll_command, exported, launch_step
from atoll.cluster.modules import load_modules
from atoll.cluster.summary import writes_text
from atoll.settings import Run

HEADER = """#!/bin/bash
# What this run does. Written when it was submitted; started again, it goes on where it stopped.
"""
STRICT = "set -euo pipefail\n"
# A site's settings of Python would reach into the image; sbatch --export=NONE would reach srun.
# Nor is what lies in the folder it was typed in ever imported (Python 3.11 and later).
ALONE = "unset PYTHONHOME PYTHONPATH PYTHONSTARTUP SLURM_EXPORT_ENV\n" + f"export {SAFE_PATH}=1\n"
# scheduler -> the shell function by which a job requeues the run.
REQUEUE = {"slurm": slurm.requeue_function, "pbs": pbs.requeue_function}
AROUND = Path(__file__).with_name("job.sh")


def around_job() -> str:
    """The text of a run's `job.sh`: what a job does around the commands of `launch.sh`."""
    return AROUND.read_text().replace("@REQUEUED_CODE@", str(run_dir.REQUEUED_CODE))


def launch_script(
    run: Run, run_folder: Path, batch_file: Path | None = None, entrypoint: str | None = None
) -> str:
    """The text of a run's `launch.sh`; with a `batch_file` its jobs may queue another one.

    entrypoint: `module:function` for all ranks to call, in place of the whole training.
    """
    scheduler = run.facility.scheduler
    queued = scheduler in REQUEUE
    asks = f'atoll() {{\n    {shlex.join(atoll_command(run))} "$@"\n}}\n'
    return (
        HEADER
        + _around(run, run_folder)
        + load_modules(run.facility)  # greets with unset variables and failing commands
        + STRICT
        + ALONE
        + (asks + REQUEUE[scheduler](run, run_folder, batch_file) if queued else "")
        + _lines(preparation(run, run_folder))
        + _lines([_ranks(run, run_folder, entrypoint)] if entrypoint else training(run, run_folder))
    )


# containers do not see the folder that PBS keeps it in
NODE_FILE = """\
unset OMP_NUM_THREADS
if [[ -f ${{PBS_NODEFILE:-}} ]]; then
    cp "$PBS_NODEFILE" {file}
    export PBS_NODEFILE={file}
fi
"""


def then_head(run: Run, run_folder: Path) -> str:
    """How `then.sh` begins: as launch.sh does, without what only a training job has."""
    header = "#!/bin/bash\n# What follows this run. Written when it was submitted.\n"
    nodes = NODE_FILE.format(file=shlex.quote(str(run_folder / "then_nodes.txt")))
    own = nodes if run.facility.scheduler == "pbs" else ""
    start = load_modules(run.facility) + STRICT + ALONE
    return header + start + own + _lines(preparation(run, run_folder))


def preparation(run: Run, run_folder: Path) -> list[list[str]]:
    """What comes before any rank: the facility's variables, and the image's checks."""
    return [
        *(["export", f"{name}={text}"] for name, text in exported(run).items()),
        *_image_checks(run, run_folder),
    ]


def training(run: Run, run_folder: Path) -> list[list[str]]:
    """The commands of a training job: prepare the tokens, train, sample, say where."""
    atoll, both = atoll_command(run), ["--both"] if run.generation.before else []
    tokenize = [*atoll, "tokenize", str(run_folder)]
    in_windows = run.data.window_shards is not None
    return [
        ["prepare_beside", *tokenize] if in_windows else tokenize,
        _ranks(run, run_folder, None),
        *([["end_preparation"]] if in_windows else []),
        *([[*atoll, "generate", str(run_folder), *both]] if writes_text(run) else []),
        _last_words(run, run_folder),
    ]


def _around(run: Run, run_folder: Path) -> str:
    """The line that reads job.sh; PBS warns nobody of the time limit, so its clock is there."""
    scheduler = run.facility.scheduler
    limit_seconds = pbs.walltime_seconds(run) if scheduler == "pbs" else None
    notice_seconds = run.restart.notice_seconds
    clock = [] if limit_seconds is None else [str(max(1, limit_seconds - notice_seconds))]
    script = str(run_dir.job_script(run_folder))
    return _lines([["source", script, str(run_folder), scheduler, *clock]])


def _lines(commands: list[list[str]]) -> str:
    return "".join(f"{shlex.join(argv)}\n" for argv in commands)


def _ranks(run: Run, run_folder: Path, entrypoint: str | None) -> list[str]:
    """All ranks. Those that train start again after a fault; others are waited for."""
    waiting = ["wait_for" if entrypoint else "run_ranks"]
    if not entrypoint and run.facility.scheduler == "slurm" and slurm.outlives(run):
        waiting += ["--outlives"]
    queued = run.facility.scheduler in REQUEUE
    return [*(waiting if queued else []), *launch_step(run, run_folder, entrypoint)]


def _image_checks(run: Run, run_folder: Path) -> list[list[str]]:
    """Signature, then what is inside against this node, before anything else is started."""
    image = run.image
    if image.file is None:
        return []
    key = ["--key", str(image.verify_key), str(image.file)]
    verify = [[run.facility.container, "verify", *key]] if image.verify_key else []
    return [*verify, [*atoll_command(run), "image", "check", str(run_folder)]]


def _last_words(run: Run, run_folder: Path) -> list[str]:
    """What was made; in a job's output where everything is, as nobody is there to look."""
    if run.facility.scheduler == "none":
        return [*atoll_command(run), "summary", str(run_folder)]
    places = {"run": run_folder, "metrics": run_dir.metrics_file(run_folder)}
    if run.training.steps != 0:
        places["checkpoints"] = run_dir.checkpoints(run_folder)
        places["export"] = run_dir.export(run_folder)
    if writes_text(run):
        places["sample"] = run_dir.sample_file(run_folder)
    words = [str(word) for place in places.items() for word in place]
    return ["printf", "%-12s %s\\n", *words]
