"""Talk to Slurm: the sbatch command of a run, and how a job of it goes on after its time."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from atoll import run_dir
from atoll.cluster.launchers import tasks
from atoll.settings import Run
from atoll.settings.machine import SubmitFlag

# sbatch's flags that a variable can carry for those who type sbatch themselves (its manual,
# INPUT ENVIRONMENT VARIABLES); there are none for nodes, tasks and cores.
VARIABLES = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "time": "SBATCH_TIMELIMIT",
    "gres": "SBATCH_GRES",
    "gpus": "SBATCH_GPUS",
    "gpus-per-node": "SBATCH_GPUS_PER_NODE",
    "gpus-per-task": "SBATCH_GPUS_PER_TASK",
    "gpu-bind": "SBATCH_GPU_BIND",
    "constraint": "SBATCH_CONSTRAINT",
    "exclusive": "SBATCH_EXCLUSIVE",
    "mem": "SBATCH_MEM_PER_NODE",
    "mem-per-cpu": "SBATCH_MEM_PER_CPU",
    "mem-per-gpu": "SBATCH_MEM_PER_GPU",
    "network": "SBATCH_NETWORK",
    "signal": "SBATCH_SIGNAL",
    "reservation": "SBATCH_RESERVATION",
    "hint": "SBATCH_HINT",
    "requeue": "SBATCH_REQUEUE",
    "no-requeue": "SBATCH_NO_REQUEUE",
}
# Requeues the run: in this job, or where that is not allowed in another one that waits for
# its end (--dependency=singleton). A new job must not inherit what this one was given.
REQUEUE = """\
requeue() {{
    printf 'atoll: the time of job %s is nearly over; the run goes on in the next one\\n' \\
        "$SLURM_JOB_ID"
    {same_job}
    for name in "${{!SLURM_@}}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    {chain}
}}
"""


def sbatch_flags(run: Run, run_folder: Path) -> dict[str, SubmitFlag]:
    """What the job asks for; `facility.submit` adds to our flags and wins over them."""
    wanted, timed = tasks(run), run.facility.walltime_minutes is not None
    return {
        "job-name": run.name,
        "nodes": run.nodes,
        "ntasks-per-node": wanted.per_node,
        "cpus-per-task": wanted.cores,
        "time": run.facility.walltime_minutes,
        "account": run.facility.account,
        "output": f"{run_folder}/slurm-%j.out",
        "signal": f"B:USR2@{run.restart.notice_seconds}" if timed else None,
        "requeue" if run.facility.requeue else "no-requeue": True,
        "dependency": "singleton",  # the same run is never trained by two jobs at once
        **run.facility.submit,
    }


def sbatch_argv(run: Run, batch_file: Path, run_folder: Path) -> list[str]:
    """The command that queues a run."""
    words = as_words(sbatch_flags(run, run_folder))
    return ["sbatch", "--parsable", *words, str(batch_file), str(run_folder)]


def sbatch_exports(run: Run) -> list[list[str]]:
    """`export SBATCH_…` commands for those flags of the run that a variable can carry."""
    flags = sbatch_flags(run, run_dir.folder(run))
    return [
        ["export", f"{VARIABLES[name]}={'' if value is True else value}"]
        for name, value in flags.items()
        if name in VARIABLES and value is not None and value is not False
    ]


def requeue_function(run: Run, run_folder: Path, batch_file: Path | None) -> str:
    """Shell text for `launch.sh`: the function by which its job requeues the run."""
    chain = shlex.join(sbatch_argv(run, batch_file, run_folder)) if batch_file else "false"
    same_job = 'scontrol requeue "$SLURM_JOB_ID" && return 0'
    return REQUEUE.format(
        same_job=same_job if run.facility.requeue else "# this facility takes no job back",
        chain=chain,
    )


def as_words(flags: Mapping[str, SubmitFlag]) -> list[str]:
    """True is a flag alone, None and False are no flag, a list repeats the flag."""
    words = []
    for name, value in flags.items():
        for given in value if isinstance(value, list) else [value]:
            if given is not None and given is not False:
                words.append(f"--{name}" if given is True else f"--{name}={given}")
    return words
