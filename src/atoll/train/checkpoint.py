"""Sharded checkpoints that exist whole or not at all.

A checkpoint is written under a hidden name; its manifest (every file's size and sha256) comes
last, then one rename makes it visible. A kill at any moment leaves the previous one untouched.
"""

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from atoll import run_dir
from atoll.errors import UserError, first_line
from atoll.sharding.process_group import (
    SharedError,
    World,
    disk_error,
    first_failure,
    gathered_by_first,
    merged_of_all,
    run_on_all_ranks,
    run_on_first_rank,
    say,
)
from atoll.train import checkpoint_manifest
from atoll.train.checkpoint_files import Written, holders_of_plain, parts_of, read_own, write_own
from atoll.train.checkpoint_manifest import MANIFEST, manifest_of
from atoll.train.checkpoint_metadata import (
    METADATA,
    entries,
    merged_tables,
    metadata_of,
    missing,
    table_of,
    write_metadata,
)

Result = TypeVar("Result")
Files = dict[str, dict[str, Any]]  # name -> its bytes and sha256

ANOTHER_RUN = "start a new run with another name="
# how torch's writer of zip files says that the disk is full
_FULL_DISK = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed|No space left")
RESUME = "fix that, then submit the same line again: it goes on from its last checkpoint"


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows beside tensors; the data's position is one integer."""

    step: int
    samples: int
    tokens: int
    world_size: int
    step_counts: dict[str, int]
    # what the guard judges the next steps by: name -> a number for each of the last, None: skipped
    history: dict[str, list[float | None]] = field(default_factory=dict)
    # digests of the texts whose samples were taken; none: of an earlier version
    texts: list[str] = field(default_factory=list)
    tokenizer: str = ""  # of their tokens

    def samples_behind(self, step: int, batch_samples: int) -> int:
        """The data's position behind a later step."""
        return self.samples + (step - self.step) * batch_samples


@dataclass
class Pending:
    """A save that goes on in the background; `finish` waits for it.

    Its tensors may not change until they are copied: `await_copy`.
    """

    step: int
    started: float  # by the monotonic clock
    copied: Future[None]
    done: Future[float]  # the seconds after which it was whole
    blocked_seconds: float = 0.0  # for which training stood still, so far


def start_save(
    run_folder: Path,
    state: dict[str, Tensor],
    progress: Progress,
    keep: int,
    world: World,
    is_copy: bool = False,
) -> Pending:
    """Copy the state and write it, both in the background; the loop goes on at once.

    Every rank calls this at the same step, having finished the save before. is_copy: nothing
    changes these tensors, so that they are written as they are.
    """
    started = time.monotonic()
    partial = run_dir.checkpoints(run_folder) / f".step-{progress.step:08d}.partial"
    run_on_first_rank(world, lambda: _prepare(partial))
    pending = Pending(progress.step, started, Future(), Future())
    in_background = replace(world, host_tree=world.checkpoint_tree)
    stager = None if is_copy else _stager(world.device)
    about = (pending, stager, state, partial, progress, keep, in_background)
    threading.Thread(target=_save, args=about, daemon=True).start()
    pending.blocked_seconds = time.monotonic() - started
    return pending


def _stager(device: torch.device) -> DefaultStager:
    """What copies the state in a thread, and on a device's stream, of its own."""
    on_device = device.type == "cuda"
    if on_device:
        # that stream does not wait for the update that the others are still at
        torch.cuda.synchronize(device)
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_device,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=on_device,
        )
    )


def await_copy(pending: Pending | None) -> float:
    """Wait until the state may change; returns the seconds waited. `finish` raises what failed."""
    if pending is None or pending.copied.done():
        return 0.0
    return _waited(pending, lambda: wait([pending.copied]))


def finish(pending: Pending | None) -> float:
    """Wait until a save is whole; returns the seconds waited.

    Raises `SharedError` on every rank if it failed on one, for example for a full disk.
    """
    if pending is None:
        return 0.0
    return _waited(pending, pending.done.result)


def _waited(pending: Pending, call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    seconds = time.monotonic() - started
    pending.blocked_seconds += seconds
    return seconds


def latest(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, by its step, never by its time stamp."""
    complete = _complete(run_folder)
    return complete[-1] if complete else None


def _complete(run_folder: Path) -> list[Path]:
    folder = run_dir.checkpoints(run_folder)
    names = os.listdir(folder) if folder.is_dir() else []
    return [
        folder / name
        for name in sorted(names)
        if run_dir.CHECKPOINT_NAME.match(name) and (folder / name / MANIFEST).is_file()
    ]


def load_progress(path: Path) -> Progress:
    """The progress a checkpoint stands for."""
    return Progress(**manifest_of(path)["progress"])


def newest_intact(run_folder: Path, world: World) -> Path | None:
    """The newest checkpoint whose files are as they were written; None where there is none at all.

    One that is not is kept aside, and the one before it is looked at. Raises `SharedError` where
    no other is left: a run does not begin anew by itself.
    """
    while (path := run_on_first_rank(world, lambda: latest(run_folder))) is not None:
        damage = _damage(path, world)
        if damage is None:
            return path
        aside = path.with_name(f"{path.name}.corrupted")
        if run_on_first_rank(world, lambda: _complete(run_folder)) == [path]:
            raise SharedError(damage, f"start anew without it: rm -r {path}")
        run_on_first_rank(world, lambda: _set_aside(path, aside))  # noqa: B023
        say(world, f"{damage}; it is kept as {aside.name}, the run goes on from the one before")
    return None


def _damage(path: Path, world: World) -> str | None:
    """What is wrong with a checkpoint, the same on every rank.

    Raises `SharedError` where one cannot read its part: it may be as it was all the same.
    """
    failed = first_failure(
        world, run_on_all_ranks(world, lambda: checkpoint_manifest.compared(path, world))
    )
    return None if failed is None else str(failed.what)


def _set_aside(path: Path, aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def load(path: Path, state: dict[str, Tensor], world: World, is_verified: bool = False) -> None:
    """Verify every file against the manifest, then read into the tensors of `state`, in place.

    Raises `SharedError` naming the first file that is not as it was written.
    """
    if not is_verified:
        run_on_all_ranks(world, lambda: checkpoint_manifest.verify(path, world))

    holders = holders_of_plain(state, world)

    def read() -> None:
        content = manifest_of(path)
        with _as_user_error(f"checkpoint {path} does not fit this run", ANOTHER_RUN, world.rank):
            of_own = None
            if content["progress"]["world_size"] == world.size:
                sizes = content.get("metadata_bytes", [])
                of_own = metadata_of(path, sizes, parts_of(state, world, holders))
            read_own(path, state, of_own)

    run_on_all_ranks(world, read)


def check_space(run_folder: Path, each_bytes: int, keep: int) -> None:
    """Refuse to start a run whose checkpoints, those kept and one more, do not fit on the disk."""
    needed = (keep + 1) * each_bytes
    run_folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run_folder).free
    if free < needed:
        raise UserError(
            f"{run_folder} has {free / 2**30:.2f} GiB free, one checkpoint takes "
            f"{each_bytes / 2**30:.2f} GiB; {keep} are kept while the next is written: "
            f"{needed / 2**30:.2f} GiB",
            "free some space, keep fewer (checkpoint.keep), or folders.runs=FOLDER elsewhere",
        )


def _prepare(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    for leftover in partial.parent.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    partial.mkdir()


def _save(
    pending: Pending,
    stager: DefaultStager | None,
    state: dict[str, Tensor],
    partial: Path,
    progress: Progress,
    keep: int,
    world: World,
) -> None:
    """In the background: copy, write and hash what is this rank's; rank 0 makes it visible.

    DCP's async_save does the first two, but keeps the caller for 0.1 s with some hundred tensors.
    """
    try:
        _take_device(world.device)
        copy = state if stager is None else stager.stage(state).result()
        pending.copied.set_result(None)
        _write(copy, partial, progress, keep, world)
        pending.done.set_result(time.monotonic() - pending.started)
    except BaseException as error:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
        pending.done.set_exception(error)
    finally:
        if stager is not None:
            stager.close()
        if not pending.copied.done():
            pending.copied.set_result(None)


def _take_device(device: torch.device) -> None:
    """Make the rank's device this thread's, which would take memory on the first one else."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _write(
    state: dict[str, Tensor], partial: Path, progress: Progress, keep: int, world: World
) -> None:
    """Each rank its own parts; what the first one needs to know of them travels up the tree."""
    what = f"checkpoint of step {progress.step} cannot be written"
    holders = holders_of_plain(state, world)

    def write() -> tuple[Written, Files]:
        with _as_user_error(what, RESUME, world.rank):
            written = write_own(partial, state, world, holders)
            return written, _as_written(partial, written.files)

    written, files = run_on_all_ranks(world, write)
    table = merged_of_all(world, table_of(written), merged_tables)
    if (name := missing(table)) is not None:
        raise SharedError(f"{what}: a part of {name} is on no rank", RESUME)
    all_entries = gathered_by_first(world, entries(written, table))
    all_files = gathered_by_first(world, files)

    def publish() -> None:
        with _as_user_error(what, RESUME):
            sizes = write_metadata(partial, table, all_entries)
            every = {name: entry for part in all_files for name, entry in part.items()}
            files = every | _as_written(partial, [METADATA])
            content = {"files": files, "progress": asdict(progress), "metadata_bytes": sizes}
            _publish(partial, content, keep)

    run_on_first_rank(world, publish)


def _as_written(partial: Path, names: list[str]) -> Files:
    return {
        name: {
            "bytes": (partial / name).stat().st_size,
            "sha256": run_dir.sha256_of(partial / name),
        }
        for name in names
    }


def _publish(partial: Path, content: dict[str, Any], keep: int) -> None:
    run_dir.write_whole(partial / MANIFEST, json.dumps(content, indent=1))
    final = partial.parent / f"step-{content['progress']['step']:08d}"
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    run_dir.sync_folder(final.parent)
    steps = sorted(n for n in os.listdir(final.parent) if run_dir.CHECKPOINT_NAME.match(n))
    for old in steps[:-keep]:  # somebody else may be at it: the new one is there all the same
        shutil.rmtree(final.parent / old, ignore_errors=True)


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a checkpoint")


@contextmanager
def _as_user_error(what: str, hint: str, rank: int = 0) -> Iterator[None]:
    """Turn what fails in a rank into two lines; DCP wraps it in a BaseException.

    The hint is for what is no fault of the disk.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:
        first: BaseException = error
        if isinstance(error, CheckpointException):
            first, _ = next(iter(error.failures.values()))
        if isinstance(first, OSError) or _FULL_DISK.search(str(first)):
            full = disk_error(first if isinstance(first, OSError) else _no_space())
            raise UserError(f"{what}: {full.found}", full.hint) from error
        why = f"rank {rank}: {type(first).__name__}: {first_line(first)}"
        raise UserError(f"{what}: {why}", hint) from error
