"""Talk to Slurm: the sbatch command of a run, and how a job of it goes on after its time."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from atoll import run_dir
from atoll.cluster.launchers import tasks
from atoll.health.exclusions import left_out
from atoll.settings import Run
from atoll.settings.machine import SubmitFlag

# sbatch's flags that a variable can carry for those who type sbatch themselves (its manual,
# INPUT ENVIRONMENT VARIABLES); there are none for nodes, tasks and cores.
CARRIED = """account partition qos gres gpus gpus-per-node gpus-per-task gpu-bind constraint
    exclusive mem-per-cpu mem-per-gpu network signal reservation hint requeue no-requeue
    no-kill"""
VARIABLES = {name: f"SBATCH_{name.upper().replace('-', '_')}" for name in CARRIED.split()}
VARIABLES |= {"time": "SBATCH_TIMELIMIT", "mem": "SBATCH_MEM_PER_NODE"}
# Requeues the run: in this job, or where that is not allowed, or nodes are left out from now on, in
# another one that waits for its end (--dependency=singleton). A new job must not inherit what this
# one was given.
REQUEUE = """\
requeue() {{
    {same_job}
    for name in "${{!SLURM_@}}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
    note_job "$({chain})"
}}
"""


def sbatch_flags(run: Run, run_folder: Path) -> dict[str, SubmitFlag]:
    """What the job asks for; `facility.submit` adds to our flags and wins over them."""
    wanted, timed = tasks(run), run.facility.walltime_minutes is not None
    return {
        "job-name": run.name,
        "nodes": run.job_nodes,
        "ntasks-per-node": wanted.per_node,
        "cpus-per-task": wanted.cores,
        "time": run.facility.walltime_minutes,
        "account": run.facility.account,
        "output": f"{run_folder}/slurm-%j.out",
        "signal": f"B:USR2@{run.restart.notice_seconds}" if timed else None,
        "requeue" if run.facility.requeue else "no-requeue": True,
        "no-kill": outlives(run),
        "dependency": "singleton",  # the same run is never trained by two jobs at once
        **run.facility.submit,
    }


def outlives(run: Run) -> bool:
    """Whether a job goes on without a node: else Slurm ends it, and requeues it if it may."""
    return run.job_nodes > 1 and bool(run.spare_nodes or not run.facility.requeue)


def sbatch_argv(run: Run, batch_file: Path, run_folder: Path) -> list[str]:
    """The command that queues a run, without the nodes that it leaves out."""
    flags = sbatch_flags(run, run_folder) | {"exclude": left_out(run, run_folder) or None}
    return [*_sbatch(flags), str(batch_file), str(run_folder)]


def behind_argv(run: Run, run_folder: Path, script: Path, job: str) -> list[str]:
    """The command that queues a script behind a job of the run, on as many nodes."""
    flags = sbatch_flags(run, run_folder) | {
        "job-name": f"{run.name}-then",
        "nodes": run.nodes,
        "output": f"{run_folder}/then-%j.out",
        "signal": None,
        "requeue": None,
        "no-requeue": True,
        "no-kill": None,
        "dependency": f"afterany:{job}",
        "exclude": left_out(run, run_folder) or None,
    }
    return [*_sbatch(flags), str(script)]


def _sbatch(flags: Mapping[str, SubmitFlag]) -> list[str]:
    return ["sbatch", "--parsable", *as_words(flags)]


def sbatch_exports(run: Run) -> list[list[str]]:
    """`export SBATCH_…` commands for those flags of the run that a variable can carry."""
    flags = sbatch_flags(run, run_dir.folder(run))
    return [
        ["export", f"{VARIABLES[name]}={'' if value is True else value}"]
        for name, value in flags.items()
        if name in VARIABLES and value is not None and value is not False
    ]


def requeue_function(run: Run, run_folder: Path, batch_file: Path | None) -> str:
    """Shell text for `launch.sh`: the function by which its job requeues the run.

    In the shell `excluded` names the nodes to leave out; the last --exclude is the one that counts.
    """
    same_job, chain = 'scontrol requeue "$SLURM_JOB_ID"', "false"
    if batch_file:
        words = shlex.join(_sbatch(sbatch_flags(run, run_folder)))
        paths = shlex.join([str(batch_file), str(run_folder)])
        chain = f'{words} ${{excluded:+"--exclude=$excluded"}} {paths}'
        same_job = f"[[ -n $excluded ]] || ! {same_job} || return 0"
    else:
        same_job = f"{same_job} && return 0"
    return REQUEUE.format(
        same_job=same_job if run.facility.requeue else "# this facility cannot requeue",
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
