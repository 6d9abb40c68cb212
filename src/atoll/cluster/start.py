"""Write a run's folder, then queue its job or run it here."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from atoll import run_dir
from atoll.cluster import before_queue, pbs, slurm, then
from atoll.cluster.job_script import around_job, launch_script, then_head
from atoll.cluster.lease import lease_of
from atoll.cluster.pass_on import run_to_its_end
from atoll.cluster.scheduler import queued, without_outer_job
from atoll.cluster.summary import has_exported, is_finished, summary
from atoll.config.binds import shared_caches
from atoll.config.compose import Composition, config_tree
from atoll.errors import UserError
from atoll.health.exclusions import excluded
from atoll.health.restarts import count_anew
from atoll.images.digest import keep_image
from atoll.settings import Run

# scheduler -> the command that queues a run
SUBMISSIONS = {"slurm": slurm.sbatch_argv, "pbs": pbs.qsub_argv}


def _discard(folder: Path) -> None:
    """Leave no trace of a refused run; whatever else is in its folder stays."""
    kept = (run_dir.launch_script, run_dir.job_script, run_dir.settings_file)
    for path in (*kept, run_dir.prediction_file, run_dir.image_file):
        path(folder).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def write_run_folder(
    composition: Composition, here: bool = False, entrypoint: str | None = None
) -> Path:
    """Write all that a job reads, then `run.yaml`, and return the run's folder.

    What the proof of a finished run's export states stays: the job finds nothing to do.
    """
    run = composition.run
    folder = run_dir.folder(run)
    text = launch_text(run, here, entrypoint)
    needed = {"prepared": run.folders.prepared}
    if run.image.file is not None:
        needed |= {f"caches.{name}": cache for name, cache in shared_caches(run).items()}
    for name, needs in needed.items():
        try:
            needs.mkdir(parents=True, exist_ok=True)  # a bind needs it
        except OSError as error:
            found = f"cannot make {needs}: {error.strerror}"
            raise UserError(found, f"give another place: folders.{name}=FOLDER") from None
    try:
        run_dir.write_whole(run_dir.job_script(folder), around_job())
        run_dir.write_whole(run_dir.launch_script(folder), text)
        is_proven = entrypoint is None and has_exported(run)
        if run.image.file is not None and not is_proven:
            keep_image(run.image.file, folder)
        elif not is_proven:
            run_dir.image_file(folder).unlink(missing_ok=True)  # of an earlier start in one
        if entrypoint is None:
            before_queue.keep_prediction(run)
        if not is_proven:
            run_dir.write_whole(run_dir.settings_file(folder), composition.as_yaml())
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _unusable(folder: Path, error: OSError) -> UserError:
    found = f"cannot write the run folder {folder}: {error.strerror}"
    return UserError(found, "give another place: folders.runs=FOLDER")


def write_then(run: Run, steps: Sequence[str]) -> Path | None:
    """Write what follows a run; None where nothing does."""
    folder = run_dir.folder(run)
    if not steps:
        return None
    text = then.script(run, folder, steps, then_head(run, folder))
    run_dir.write_whole(run_dir.then_script(folder), text)
    return run_dir.then_script(folder)


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
    if not runs_here(run, here):
        job = _queue(composition, environment, entrypoint)
        print(f"job {job}: {run_dir.folder(run)}", flush=True)
        if follows is not None and write_then(*follows):
            print(then.queue_behind(follows[0], run_dir.folder(run), job, environment), flush=True)
        return 0
    command = ["bash", str(run_dir.launch_script(run_dir.folder(run)))]
    if run.facility.scheduler == "none":
        _refuse_second(run)
        if entrypoint is None and is_finished(run):
            print(_made(run))
            script = None if follows is None else write_then(*follows)
            return subprocess.run(["bash", str(script)]).returncode if script else 0
    folder = write_run_folder(composition, here, entrypoint)
    print(f"run {run.name} in {folder}", flush=True)
    script = None if follows is None else write_then(*follows)
    if last and script is None:
        os.execvp(command[0], command)  # signals reach the run, its exit code is ours
    code = run_to_its_end(command)
    return run_to_its_end(["bash", str(script)]) if script and code == 0 else code


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
    count_anew(folder)
    try:
        job = queued(submission(run), without_outer_job(environment))
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


def submission(run: Run) -> list[str]:
    argv = SUBMISSIONS[run.facility.scheduler]
    return argv(run, _batch_file(), run_dir.folder(run))


def launch_text(run: Run, here: bool, entrypoint: str | None = None) -> str:
    """`launch.sh`; a job that a person queued by hand is theirs to queue again."""
    batch_file = None if here else _batch_file()
    return launch_script(run, run_dir.folder(run), batch_file, entrypoint)


def _batch_file() -> Path:
    return config_tree().parent / "sbatch" / "train.sbatch"


def runs_here(run: Run, here: bool) -> bool:
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
