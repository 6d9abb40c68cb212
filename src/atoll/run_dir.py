"""Every path of a run, by name, and how a file appears whole or not at all."""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from atoll.errors import FAILURE
from atoll.settings import Run

# The exit code of ranks when their time was over and the state is saved: above those of signals,
# because the highest of all ranks counts.
RESTART_CODE = 200
REQUEUED_CODE = 75  # of a job that queued the run again: sysexits.h, EX_TEMPFAIL
AGAIN_SECONDS = (1.0, 5.0, 20.0)
# errors of a shared file system that comes back
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENOTCONN}
CHECKPOINT_NAME = re.compile(r"^step-(\d{8})$")


def folder(run: Run) -> Path:
    return run.folders.runs / run.name


def settings_file(run_folder: Path) -> Path:
    return run_folder / "run.yaml"


def text_report_file(run_folder: Path) -> Path:
    """What is in the text that a run learns from: `atoll tokenize --report`."""
    return run_folder / "text-report.md"


def launch_script(run_folder: Path) -> Path:
    return run_folder / "launch.sh"


def then_script(run_folder: Path) -> Path:
    """What follows the run: `atoll submit --then`."""
    return run_folder / "then.sh"


def then_jobs_file(run_folder: Path) -> Path:
    """The jobs of what follows the run: in each line a scheduler and an id."""
    return run_folder / "then.txt"


def scores_file(folder: Path) -> Path:
    """Of a run, a checkpoint or an export: what lm-evaluation-harness said of it last."""
    return folder / "scores.json"


def job_script(run_folder: Path) -> Path:
    """What `launch.sh` reads first: one job holds the run, hears of its time limit, goes on."""
    return run_folder / "job.sh"


def lease_folder(run_folder: Path) -> Path:
    """Which job holds the run: of its files, all numbers, the highest."""
    return run_folder / "lease"


def stop_file(run_folder: Path) -> Path:
    """While it is there, the ranks save their state and stop: the job's time is nearly over."""
    return run_folder / "stop"


def restart_file(run_folder: Path) -> Path:
    """Written when the state is saved and the job should queue the run again."""
    return run_folder / "restart"


def preparing_file(run_folder: Path) -> Path:
    """While a job prepares tokens beside its ranks: starting, running or failed."""
    return run_folder / "preparing"


def jobs_file(run_folder: Path) -> Path:
    """The jobs of a run: in each line a scheduler, an id, and `refused` if another held the run."""
    return run_folder / "jobs.txt"


def prediction_file(run_folder: Path) -> Path:
    """What the run was expected to take when it was submitted."""
    return run_folder / "prediction.json"


def predicted(run_folder: Path, of_each: str = "value") -> dict[str, Any]:
    """Figure -> value, as the run's last submission predicted it; empty where none did."""
    file = prediction_file(run_folder)
    figures = json.loads(file.read_text()).get("predicted", {}) if file.is_file() else {}
    return {name: each.get(of_each) for name, each in figures.items()}


def restarts_file(run_folder: Path) -> Path:
    """How often a run was started again by itself since a person submitted it, and why."""
    return run_folder / "restarts.jsonl"


def excluded_file(run_folder: Path) -> Path:
    """The nodes that a run's jobs leave out, and why; to delete an entry takes its node back."""
    return run_folder / "excluded.json"


def faults_file(run_folder: Path) -> Path:
    """What went wrong in a run, where, and what says so."""
    return run_folder / "faults.jsonl"


def node_records(run_folder: Path) -> Path:
    """What the nodes of a start wrote down of their ranks, a folder for each start that failed."""
    return run_folder / "health"


def doctor_file(run_folder: Path) -> Path:
    """What the ranks of a doctor's job found."""
    return run_folder / "doctor.json"


def certificate(run: Run) -> Path:
    """What a doctor's job measured of a facility, and when."""
    return run.folders.facilities / f"{run.facility.name}.json"


def add_to_certificate(run: Run, measured: dict[str, Any]) -> None:
    """Write what was measured over the facility's certificate, whose other figures stay."""
    file = certificate(run)
    try:
        known = dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        known = {}
    today = datetime.now(timezone.utc).date().isoformat()
    first = {"facility": run.facility.name, "measured_on": today}
    write_whole(file, json.dumps(first | known | measured, indent=1) + "\n")


def failure(run_folder: Path) -> str:
    """The mistake that ended the last start of a run, and how to fix it; empty if none did.

    A later start that wrote down more than a fault had got past it.
    """
    file = run_folder / FAILURE
    if not file.is_file():
        return ""
    lines, at = metrics(run_folder), file.stat().st_mtime
    if any(line["event"] != "fault" and line.get("time", at) > at for line in lines):
        return ""
    return "; ".join(file.read_text().splitlines())


def metrics_file(run_folder: Path) -> Path:
    return run_folder / "metrics.jsonl"


def status_file(run_folder: Path) -> Path:
    """What the scheduler said last, for those who ask often."""
    return run_folder / "status.json"


def accounting_file(run_folder: Path) -> Path:
    """What the scheduler's accounting has of the run's jobs, once all have ended."""
    return run_folder / "accounting.json"


def held_file(run_folder: Path) -> Path:
    """When each job took and left the run, as `job.sh` noted: began or ended, lease, time."""
    return run_folder / "held.txt"


def sbom_file(run_folder: Path) -> Path:
    """What is in the image that the run was made in."""
    return run_folder / "sbom.cdx.json"


def image_file(run_folder: Path) -> Path:
    """Which image the run was submitted with: its file's name and sha256."""
    return run_folder / "image.json"


def ledger_file(run_folder: Path) -> Path:
    """Where the time of all starts of a run went."""
    return run_folder / "ledger.jsonl"


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The records of a run so far; a line that is half written is left for the next time."""
    return records(metrics_file(run_folder))


def tensorboard(run_folder: Path) -> Path:
    return run_folder / "tensorboard"


def wandb(run_folder: Path) -> Path:
    return run_folder / "wandb"


def mlflow(run_folder: Path) -> Path:
    """The store of all runs of a folder, so that MLflow can compare them."""
    return run_folder.parent / ".mlflow"


def mlflow_run_file(run_folder: Path) -> Path:
    """The id that a run has in it."""
    return run_folder / "mlflow.txt"


def reference_file(folder: Path) -> Path:
    """Log-probabilities of both answers of every pair under the model as the run began."""
    return folder / "reference.npz"


def result_file(run_folder: Path) -> Path:
    return run_folder / "result.json"


def checkpoints(run_folder: Path) -> Path:
    return run_folder / "checkpoints"


def checkpoint(run_folder: Path, step: int) -> Path:
    return checkpoints(run_folder) / f"step-{step:08d}"


def complete_checkpoints(run_folder: Path) -> list[int]:
    """The steps of the checkpoints that are whole, the newest last."""
    files = checkpoints(run_folder).glob("step-*/manifest.json")
    names = (CHECKPOINT_NAME.match(file.parent.name) for file in files)
    return sorted(int(name[1]) for name in names if name)


def export(run_folder: Path) -> Path:
    return run_folder / "export"


def averaged_export(run_folder: Path) -> Path:
    """Of the average of the weights (optimizer.ema_decay)."""
    return run_folder / "export_ema"


def scored_model(run_folder: Path) -> Path:
    """The model of a step while all ranks read it, to score it (evaluation.tasks)."""
    return run_folder / ".scored"


def sample_file(run_folder: Path) -> Path:
    return run_folder / "sample.txt"


def untrained_sample_file(run_folder: Path) -> Path:
    """What the model wrote before its training, where generation.before asks for it."""
    return run_folder / "sample-before.txt"


def prepared(run: Run) -> Path:
    """The folder of tokens and tokenizer, shared by all runs that read the same data."""
    if run.folders.bundle is not None:
        return run.folders.bundle / "tokens"
    return run.folders.prepared / f"{run.data.name}-{prepared_digest(run)}"


def source_runs(run: Run) -> list[Run]:
    """A run on each source alone, with the tokenizer of all; the run itself where it has one."""
    if not run.data.sources:
        return [run]
    tokenizer = run.tokenizer
    if tokenizer.path is None and run.model.source is None:  # made of all sources together
        made: dict[str, Any] = {
            "path": str(prepared(run) / "tokenizer"),
            "add_tokens": [],
            "chat_template": None,
        }
        tokenizer = tokenizer.model_copy(update=made)
    update = {"tokenizer": tokenizer}
    return [run.model_copy(update=update | {"data": data}) for data in run.data.each]


def prepared_sources(run: Run) -> list[Path]:
    """The folder of the tokens of each source, or of the only one."""
    if run.data.sources and run.folders.bundle is not None:
        return [prepared(run) / "sources" / source.name for source in run.data.sources]
    return [prepared(source) for source in source_runs(run)]


def bundled_tasks(run: Run) -> Path | None:
    """The data of the tasks that a run is scored with, where a bundle has them."""
    return None if run.folders.bundle is None else tasks_folder(run.folders.bundle)


def tasks_folder(bundle: Path) -> Path:
    return bundle / "tasks"


def own_tasks(folder: Path) -> Path:
    """In a bundle's folder of tasks: evaluation.tasks_folder, as it was."""
    return folder / "own"


def bundle_manifest(bundle: Path) -> Path:
    return bundle / "bundle.json"


def bundle_request(bundle: Path) -> Path:
    return bundle / "request.yaml"


def prepared_digest(run: Run) -> str:
    """What the tokens depend on: not on packing, batching or workers, nor on sources' weights.

    Nor on the sequence length, but for rows that are cut to it: with labels, and conversations.
    """
    free = {"batching", "packing", "window_shards", "workers"}
    is_cut = run.data.classes is not None or run.data.holds_conversations
    free |= set() if is_cut else {"sequence_tokens"}
    data = run.data.model_dump(mode="json", exclude=free, exclude_defaults=True)
    for source in data.get("sources", []):
        for name in ("weight", "max_epochs"):
            source.pop(name, None)
    tokenizer = run.tokenizer.model_dump(mode="json", exclude_defaults=True)
    path = None if run.tokenizer.path is None else Path(run.tokenizer.path)
    if path is not None and path.is_relative_to(run.folders.prepared):
        tokenizer["path"] = path.relative_to(run.folders.prepared).as_posix()
    if path is None:
        tokenizer |= {"model": run.model.source, "revision": run.model.revision}
    return digest({"data": data, "tokenizer": tokenizer, "seed": run.seed})


def digest(value: Any, length: int = 10) -> str:
    """A short, stable name for plain JSON values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def records(path: Path, most_bytes: int = -1) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none of a line that was, or is being, cut short.

    most_bytes: of its beginning alone.
    """
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        return whole_records(file.read(most_bytes).splitlines())


def whole_records(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Of lines of JSON those that are not cut short."""
    whole = []
    for line in lines:
        with suppress(ValueError):
            whole.append(json.loads(line))
    return whole


def append_record(path: Path, record: Mapping[str, Any], is_durable: bool = False) -> None:
    """Add a line in one piece, behind the end of one that a full disk or a kill cut short.

    Where a file system is away for a moment it is tried again. `is_durable`: it survives a power
    cut.
    """
    line = f"{json.dumps(record)}\n".encode()
    for seconds in (*AGAIN_SECONDS, None):
        try:
            _append(path, line, is_durable)
            return
        except OSError as error:
            if seconds is None or error.errno not in PASSING:
                raise
            time.sleep(seconds)


def _append(path: Path, line: bytes, is_durable: bool) -> None:
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            while line:  # what is left of it, where the disk is full, is for the system to refuse
                line = line[file.write(line) :]
        except OSError as error:
            error.filename = str(path)  # a write knows no name
            raise
        if is_durable:
            os.fsync(file.fileno())


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is seen complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o7775)  # by nobody else
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as where the disk is full
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def copy_synced(source: str, target: str) -> str:
    """Copy a file so that it survives a power cut, as the name of its folder does."""
    shutil.copyfile(source, target)
    sync_file(Path(target))
    return target


def sync_folder(path: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's content survive a power cut."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, read in 4 MiB pieces into the same memory."""
    hasher = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size  # of a small file less: thousands took a second
        piece = bytearray(max(1 << 12, min(4 << 20, size)))
        while size := file.readinto(piece):
            hasher.update(memoryview(piece)[:size])
    return hasher.hexdigest()
