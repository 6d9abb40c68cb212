"""The whole job asked of a facility's mirror, then a small one run under its constraints."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll import run_dir
from atoll.cluster import limits, pbs, slurm
from atoll.commands import Finished, run_command
from atoll.config.compose import compose, config_tree, groups
from atoll.errors import UserError
from atoll.launch import expand_hosts
from atoll.rehearse.daemons import database, start_slurm
from atoll.rehearse.mirror import ACCOUNT, DEFAULT_HOSTS, LIVE_NODES, Mirror, mirror_of
from atoll.rehearse.rows import DIFFERS, PASSED, UNKNOWN, Row
from atoll.rehearse.stage import Stage
from atoll.settings import Run
from atoll.settings.machine import Facility

RANKS_PER_NODE = 2  # of the small job
DEADLINE_SECONDS = 300.0
# What the small job takes over from the line that was typed; the rest is about size.
KEPT = ("facility", "sharding", "launcher", "precision", "restart", "image.bind_source")
SIZES = ("nodes=", "ranks_per_node=", "name=", "experiment=")
NO_OPENPBS = "neither Debian nor PyPI has OpenPBS"


@dataclass(frozen=True)
class Rehearsal:
    """The run that was asked for, and what stands for its facility."""

    run: Run
    overrides: list[str]
    stage: Stage
    environment: Mapping[str, str]


def rehearsed(overrides: Sequence[str], folder: Path) -> list[Row]:
    """The rows of one rehearsal; `folder` is empty, and where everything of it is."""
    try:
        run = whole_run(overrides)
    except UserError as error:
        return [Row(DIFFERS, "line", _shown(error))]
    facility = run.facility
    if facility.unsupported:
        return [Row(UNKNOWN, "support", f"refused by Atoll: {facility.unsupported}")]
    if run.launcher.name == "ssh":
        return [Row(UNKNOWN, "job", "no machine here answers ssh to the names of a host file")]
    stage = Stage(folder)
    stage.open_loopback()
    rehearsal = Rehearsal(run, list(overrides), stage, stage.environment())
    mirror = None if facility.scheduler == "none" else mirror_of(run, as_stated(facility.name))
    set_stage(rehearsal, mirror)
    rows = [Row(PASSED, "line", f"{run.nodes} nodes x {run.ranks_per_node} ranks compose")]
    try:
        if mirror is not None:
            start_slurm(mirror, stage.slurm, rehearsal.environment)
            rows.append(ask_for_whole_job(rehearsal, mirror))
        rows += run_small_job(rehearsal)
    except UserError as error:
        rows.append(Row(DIFFERS, "testbed", _shown(error)))
    finally:
        if mirror is not None:
            database(f"drop database if exists {mirror.cluster}")
    return [*rows, *unknowable(run)]


def whole_run(overrides: Sequence[str]) -> Run:
    """The run as typed, with an account and as many nodes as the queue takes at least.

    Raises `UserError` as `atoll submit` does.
    """
    words = [*overrides, *_unless(overrides, "experiment=", "rehearsal")]
    one_rank = compose([*words, "nodes=1", "ranks_per_node=1"]).run
    facility, (_, queue) = one_rank.facility, limits.job_limits(one_rank)
    if facility.limits.needs_account and not facility.account:
        words.append(f"facility.account={ACCOUNT}")
    words += _unless(overrides, "nodes=", queue.min_nodes)
    if not any(word.startswith(("experiment=", "training.")) for word in overrides):
        nodes = int(
            next(w for w in reversed(words) if w.startswith("nodes=")).removeprefix("nodes=")
        )
        words.append(f"training.global_batch_samples={nodes * facility.node.devices}")
    run = compose(words).run
    if not facility.unsupported:
        limits.check_nodes(run)
        limits.check_queue(run)
    return run


def as_stated(name: str) -> Facility:
    """A facility without what was typed."""
    return compose([f"facility={name}", "nodes=1", "ranks_per_node=1"]).run.facility


def _unless(words: Sequence[str], key: str, value: object) -> list[str]:
    """`key` with a value, where nothing that was typed says another."""
    return [] if any(word.startswith(key) for word in words) else [f"{key}{value}"]


def set_stage(rehearsal: Rehearsal, mirror: Mirror | None) -> None:
    """Hosts, modules and programs as the facility has them."""
    facility, stage = rehearsal.run.facility, rehearsal.stage
    written = expand_hosts(facility.node_names or DEFAULT_HOSTS)
    stage.name_hosts(written, facility.address_suffix)
    stage.write_modules(facility.modules)
    lines = [host for host in written[:LIVE_NODES] for _ in range(RANKS_PER_NODE)]
    mpiexec = shutil.which("mpiexec") if facility.scheduler == "pbs" else None
    stage.write_programs(facility.container, lines, mpiexec)


def ask_for_whole_job(rehearsal: Rehearsal, mirror: Mirror) -> Row:
    """Queue the job as typed, held back, and cancel it: does the scheduler take the line."""
    run, environment = rehearsal.run, rehearsal.environment
    folder, batch_file = rehearsal.stage.folder, config_tree().parent / "sbatch" / "train.sbatch"
    argv, hold = {"slurm": (slurm.sbatch_argv, "--hold"), "pbs": (pbs.qsub_argv, "-h")}[
        run.facility.scheduler
    ]
    program, *words = argv(run, batch_file, folder)
    done = run_command([program, hold, *words], environment=environment)
    taken = done.returncode == 0
    if taken:
        run_command(["scancel", done.stdout.split(";")[0].strip()], environment=environment)
    asked = f"{mirror.default_partition}, {run.nodes} nodes"
    seen = f"{program} took the whole line: {asked}" if taken else done.last_line
    if run.facility.scheduler == "pbs":
        return Row(UNKNOWN, "scheduler", f"{seen}; this qsub is Slurm's: {NO_OPENPBS}")
    return Row(PASSED if taken else DIFFERS, "scheduler", seen)


def run_small_job(rehearsal: Rehearsal) -> list[Row]:
    """Train a few steps through the batch file, as its user would."""
    run, stage = rehearsal.run, rehearsal.stage
    image = _image()
    words = small_words(rehearsal, image)
    small = compose(words).run
    started = time.monotonic()
    batch_file = config_tree().parent / "sbatch" / "train.sbatch"
    done = run_command(
        [str(batch_file), *words],
        environment=rehearsal.environment,
        timeout_seconds=DEADLINE_SECONDS,
    )
    folder = run_dir.folder(small)
    if done.returncode == 0 and run.facility.scheduler != "none":
        _wait_for_end(rehearsal, folder)
    seconds = time.monotonic() - started
    output = _output(folder, done)
    size = f"{small.nodes} nodes x {small.ranks_per_node} ranks"
    if not (run_dir.result_file(folder).exists() and run_dir.export(folder).exists()):
        return [Row(DIFFERS, "job", f"{size}: {_reason(output)}")]
    job = Row(PASSED, "job", f"{size}, {small.training.steps} steps and export, {seconds:.0f} s")
    return [job, *what_job_showed(run, small, image, output, stage)]


def small_words(rehearsal: Rehearsal, image: Path | None) -> list[str]:
    """The line of the small job: the facility's own settings, with stand-ins for its paths."""
    run, stage = rehearsal.run, rehearsal.stage
    facility = run.facility
    nodes = LIVE_NODES if facility.scheduler != "none" else 1
    kept = [w for w in rehearsal.overrides if w.startswith(KEPT) and not w.startswith(SIZES)]
    queues = [f"facility.limits.queues.{name}.min_nodes=1" for name in facility.limits.queues]
    words = [
        f"experiment={_small_experiment(rehearsal.overrides)}",
        *kept,
        "name=small",
        f"nodes={nodes}",
        f"ranks_per_node={RANKS_PER_NODE}",
        f"folders.runs={stage.folder}/runs",
        f"folders.prepared={stage.folder}/prepared",
        "facility.node.device=cpu",
        "facility.node.architecture=x86_64",
        "facility.limits.min_nodes=1",
        *queues,
        *stage.stand_ins(facility),
        "generation.prompt=null",
        "preflight=false",  # its nodes are one machine, whose processors they share
    ]
    if facility.scheduler != "none":
        words += [f"facility.account={facility.account or ACCOUNT}", "facility.walltime_minutes=10"]
    if facility.scheduler == "pbs":
        words += [f"facility.submit.l=['nodes={nodes}:ppn={RANKS_PER_NODE},walltime=00:10:00']"]
    if image is None:
        return [*words, "image=none"]
    return [*words, "image=cpu", f"image.file={image}", "image.bind_source=true"]


def what_job_showed(
    run: Run, small: Run, image: Path | None, output: str, stage: Stage
) -> list[Row]:
    """The rows of what a job that ended well went through."""
    facility = run.facility
    rows = []
    if facility.modules.load:
        refused = [line for line in output.splitlines() if "module" in line.lower()]
        state = DIFFERS if refused else PASSED
        named = f"module load {' '.join(facility.modules.load)}"
        rows.append(Row(state, "modules", "; ".join([named, *refused[:1]])))
    if facility.binds:
        hidden = ", ".join(facility.binds)
        rows.append(
            Row(PASSED, "binds", f"nothing the image needs is hidden by {hidden}")
            if image
            else Row(UNKNOWN, "binds", "no image here to lay them over: make image-cpu")
        )
    if small.nodes > 1 and facility.node_names:
        first = expand_hosts(facility.node_names)[0].split(".")[0] + facility.address_suffix
        rows.append(Row(PASSED, "node names", f"{facility.node_names}: ranks met at {first}"))
    rows.append(Row(PASSED, "network", "the job had no network but its own nodes'"))
    return rows


def unknowable(run: Run) -> list[Row]:
    """What no machine without the facility's hardware and images can know."""
    facility, node = run.facility, run.facility.node
    rows = []
    if node.device != "cpu":
        absent = f"{node.devices} {node.device} devices a node: none here, ranks ran on processors"
        rows.append(Row(UNKNOWN, "devices", absent))
    if run.image.args_file and run.image.device != "cpu":
        rows.append(Row(UNKNOWN, "image", f"image={run.image.name}: image=cpu stood for it"))
    if node.architecture != "x86_64":
        rows.append(Row(UNKNOWN, "architecture", f"{node.architecture}: this machine is x86_64"))
    variables = [name for name in facility.environment if name.startswith(("NCCL", "FI_", "CCL"))]
    if variables:
        rows.append(Row(UNKNOWN, "fabric", f"{', '.join(variables)}: read by no library here"))
    if facility.task_binding or facility.step:
        flags = " ".join([*facility.step, *facility.task_binding])
        rows.append(Row(UNKNOWN, "binding", f"{flags}: taken by the launcher, held by no cgroup"))
    return rows


def _small_experiment(overrides: Sequence[str]) -> str:
    """The smoke size of the experiment that was asked for."""
    named = [word.partition("=")[2] for word in overrides if word.startswith("experiment=")]
    smoke = f"{named[-1]}_smoke" if named else "rehearsal"
    return smoke if smoke in groups(config_tree())["experiment"] else "rehearsal"


def _image() -> Path | None:
    """The clone's CPU image, if there is one."""
    images = sorted((config_tree().parent / "images").glob("cpu*.sif"))
    return images[-1].resolve() if images else None


def _wait_for_end(rehearsal: Rehearsal, folder: Path) -> None:
    """Wait until the result is there, or the queue is empty."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    made = (run_dir.result_file(folder), run_dir.export(folder))
    while not all(path.exists() for path in made) and time.monotonic() < deadline:
        queue = run_command(["squeue", "--noheader"], environment=rehearsal.environment)
        if queue.returncode == 0 and not queue.stdout.strip():
            return
        time.sleep(0.5)


def _output(folder: Path, submitted: Finished) -> str:
    files = sorted(folder.glob("*.out"))
    return "\n".join([submitted.stdout, submitted.stderr, *(f.read_text() for f in files)])


def _reason(output: str) -> str:
    """The first complaint in a job's output, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marks = ("atoll:", "rror", "FATAL", "atal:")
    complaints = [line for line in lines if any(mark in line for mark in marks)]
    return next(iter([*complaints[:1], *lines[-1:], "no output"]))


def _shown(error: UserError) -> str:
    return f"{error.found} → {error.hint}"
