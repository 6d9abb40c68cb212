"""`--then evaluate,report`: what follows a run, in a job that waits for its end.

The job is behind the run's first one. That may be queued again, or the run goes on in another job:
then this one goes to the end of the queue again, behind that.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll import run_dir
from atoll.cluster import pbs, slurm
from atoll.cluster.jobs import JobId, ask
from atoll.cluster.launchers import atoll_command, on_each_rank
from atoll.cluster.scheduler import queued, without_outer_job
from atoll.config.bundle import refuse_other_tasks
from atoll.errors import UserError
from atoll.settings import Run

# scheduler -> the command that queues a script behind a job
BEHIND: dict[str, Callable[[Run, Path, Path, str], list[str]]] = {
    "slurm": slurm.behind_argv,
    "pbs": pbs.behind_argv,
}
# what a scheduler says of a job that will still do something for the run
LIVES = {
    "slurm": '[[ $(squeue --noheader --states=all "--jobs=$1" --format=%T 2> /dev/null) =~ '
    "^(PENDING|CONFIGURING|RUNNING|COMPLETING|REQUEUE|SUSPENDED|STOPPED|SIGNALING) ]]",
    "pbs": 'qstat "$1" 2> /dev/null | tail -n 1 | grep -qE " [QHWRSBEU] "',
}
GOES_ON = """\
lives() {{
    {lives}
}}
if [[ ! -e {result} ]]; then
    job=$(awk '$1 == "{scheduler}" && NF == 2 {{ ids[++n] = $2 }}
        $1 == "{scheduler}" && $3 == "refused" {{ no[$2] }}
        END {{ while (n && ids[n] in no) n--; print n ? ids[n] : "" }}' {jobs})
    if [[ -n $job ]] && lives "$job"; then
        for name in "${{!SLURM_@}}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done
        next=$({again} | sed -nE 's/^(Submitted batch job )?([0-9][^; ]*)(;.*)?$/\\2/p' | tail -n 1)
        printf '%s %s\\n' {scheduler} "$next" >> {then}
        printf 'atoll: the run goes on in job %s; what follows it waits in %s\\n' "$job" "$next"
        exit 0
    fi
    printf 'atoll: the run has not come to its end: atoll status %s says why\\n' {name} >&2
    printf '       type the line of the run again\\n' >&2
    exit 1
fi
"""


def steps_of(text: str | None) -> list[str]:
    """The words of --then, in their order; `UserError` for one that is none."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if word not in STEPS:
            raise UserError(
                f"--then {text}: {word or 'nothing'} is no step that follows a run",
                f"choose from {', '.join(STEPS)}, with commas between",
            )
    return list(dict.fromkeys(words))


def scored(run: Run, steps: Sequence[str], tasks: str | None) -> Run:
    """The run with the tasks that `evaluate` scores; `UserError` where there are none to score."""
    if "evaluate" not in steps:
        if tasks is not None:
            raise UserError(f"--tasks {tasks}, and nothing scores them", "--then evaluate")
        return run
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    evaluation = run.evaluation.model_copy(update={"tasks": names or run.evaluation.tasks})
    if not evaluation.tasks:
        raise UserError(
            "--then evaluate, and no task is named", "--tasks NAMES, or evaluation.tasks=[NAMES]"
        )
    if run.training.steps == 0 or run.data.classes is not None:
        raise UserError(
            "--then evaluate scores an export that continues text, and this run makes none",
            "leave evaluate out",
        )
    changed = run.model_copy(update={"evaluation": evaluation})
    refuse_other_tasks(changed)
    return changed


def script(run: Run, folder: Path, steps: Sequence[str], head: str) -> str:
    """The text of `then.sh`; head: what every job of the run begins with."""
    goes_on = "" if run.facility.scheduler == "none" else _goes_on(run, folder)
    lines = [f"{shlex.join(STEPS[step](run, folder))}\n" for step in steps]
    return head + goes_on + "".join(lines)


def behind(run: Run, folder: Path, job: str) -> str:
    """The command that queues `then.sh` behind a job, as shell text; `$job` may be its name."""
    argv = BEHIND[run.facility.scheduler](run, folder, run_dir.then_script(folder), job)
    return shlex.join(argv)


def _goes_on(run: Run, folder: Path) -> str:
    """Shell text: begin only where the run has come to its end, else wait for its next job."""
    scheduler = run.facility.scheduler
    words = {
        "result": run_dir.result_file(folder),
        "jobs": run_dir.jobs_file(folder),
        "then": run_dir.then_jobs_file(folder),
        "name": folder,
    }
    return GOES_ON.format(
        lives=LIVES[scheduler],
        scheduler=scheduler,
        again=behind(run, folder, "@job@").replace("@job@", '"$job"'),
        **{name: shlex.quote(str(path)) for name, path in words.items()},
    )


def queue_behind(run: Run, folder: Path, job: str, environment: Mapping[str, str]) -> str:
    """Queue `then.sh` behind a job of the run, unless it waits already; a line that says so."""
    scheduler = run.facility.scheduler
    if waiting := waiting_job(folder):
        return f"job {waiting}: waits already for the end of {run.name}"
    argv = BEHIND[scheduler](run, folder, run_dir.then_script(folder), job)
    own = queued(argv, without_outer_job(environment))
    with open(run_dir.then_jobs_file(folder), "a") as file:
        file.write(f"{scheduler} {own}\n")
    return f"job {own}: waits for the end of {run.name}"


def waiting_job(folder: Path) -> str:
    """The job of what follows a run that is queued or runs; empty: there is none."""
    last = then_jobs(folder)[-1:]
    alive = [job for job, answer in ask(last).items() if answer.state in ("queued", "running")]
    return alive[0][1] if alive else ""


def then_jobs(folder: Path) -> list[JobId]:
    """Scheduler and id of each job of what follows a run, the last one newest."""
    file = run_dir.then_jobs_file(folder)
    words = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    return [(line[0], line[1]) for line in words if len(line) == 2]


def then_line(folder: Path) -> str:
    """How what follows a run is; empty where nothing does."""
    jobs = then_jobs(folder)
    if not jobs:
        return ""
    answer = ask(jobs[-1:]).get(jobs[-1])
    state = "unknown" if answer is None else ", ".join(filter(None, (answer.state, answer.why)))
    return f"{folder.name}, what follows it: job {jobs[-1][1]}: {state}"


def evaluate(run: Run, folder: Path) -> list[str]:
    """The scores of the export, by all ranks of the job."""
    asked, bundle = run.evaluation, run.folders.bundle
    values = {
        "--tasks": ",".join(asked.tasks),
        "--tasks-folder": asked.tasks_folder,
        "--bundle": bundle if bundle and os.path.isdir(run_dir.tasks_folder(bundle)) else None,
        "--num-fewshot": asked.fewshot,
        "--limit": asked.task_samples,
        "--out": run_dir.scores_file(folder),
    }
    words = [f"{name}={value}" for name, value in values.items() if value is not None]
    return on_each_rank(run, "scores", [*words, str(run_dir.export(folder))])


def report(run: Run, folder: Path) -> list[str]:
    """The run's report.html."""
    return [*atoll_command(run), "report", str(folder)]


STEPS: dict[str, Callable[[Run, Path], list[str]]] = {"evaluate": evaluate, "report": report}
