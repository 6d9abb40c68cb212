"""Samples in windows of shards, so that training begins while the rest of its text is prepared.

A window is `data.window_shards` shards in a row. Its documents are packed by themselves, its
samples are drawn in an order of their own, and windows follow one another: the order depends on the
settings and the text alone, whatever was ready when. Of each window whole batches are taken; what
is left over, less than one, is another part of it in each epoch.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np

from atoll import run_dir
from atoll.data import shards
from atoll.data.keyed_hash import keyed
from atoll.data.order import sample_ids
from atoll.data.pack import Ints, PackingPlan
from atoll.data.samples import Samples, source_samples
from atoll.data.shards import Split, TokenManifest, TokenPlan, TokenShard
from atoll.errors import UserError
from atoll.settings import Run

T = TypeVar("T")
Wait = Callable[[str], None]  # for what is missing: a moment; raises where nobody makes it
POLL_SECONDS = 0.5
SETTLE_SECONDS = 60.0  # so long a node's cache may hide what another one wrote
STARTING, RUNNING, FAILED = "starting", "running", "failed"  # of a preparation beside ranks


class TimeIsOver(UserError):
    """The job's time is nearly over, and what a rank waits for is still being prepared."""


class Drawn(NamedTuple):
    """A global batch: the samples that hold it, which of them, and epochs of each source.

    opens_window: it is the first of its window, which ranks may have to wait for.
    """

    samples: Samples
    ids: Ints
    epochs: dict[str, float]
    opens_window: bool = False


class Windows:
    """The training samples of one text, window by window; of use to one thread at a time.

    Raises `UserError` where a shard is missing and `wait` says that nobody makes it, or one is
    corrupted.
    """

    def __init__(self, run: Run, wait: Wait, rank: int = 0, world_size: int = 1) -> None:
        assert run.data.window_shards is not None
        self.run, self.wait = run, wait
        self.folder = run_dir.prepared(run)
        self._own_part = rank, world_size
        self._text = _awaited(lambda: _plan(self.folder), wait, f"{self.folder}/plan.json")
        shards.refuse_wrong_tokenizer(self.folder, self._text)
        self.count = -(-self._text.shard_counts["train"] // run.data.window_shards)
        self._batches: list[int] = []  # that a window gives, of those opened so far
        self.opened = lru_cache(maxsize=2)(self._open)
        if self._next_batches() == 0:
            self._refuse_small_window()

    @property
    def manifest(self) -> TokenManifest:
        """Of the first window."""
        return self.opened(0).sources[0].manifest

    @property
    def plan(self) -> PackingPlan:
        """How the documents of the first window fill its samples."""
        return self.opened(0).plan

    def validation(self) -> Samples:
        """Held-out documents of the first window's shards, or all where they have their own files.

        Raises `UserError` where those hold out nothing.
        """
        if not self.manifest.documents("validation"):
            raise UserError(
                f"the first window ({self.run.data.window_shards} shards) holds out no document",
                "a larger data.window_shards, or data.validation.files",
            )
        held_out = source_samples(self.run.data, self.folder, "validation", self.manifest)
        return Samples([held_out], "validation")

    def draw(self, position: int) -> Drawn:
        """The global batch behind so many samples of the endless order; waits for its window.

        Raises `UserError` where those were no whole batches.
        """
        size = self.run.training.global_batch_samples
        if position % size:
            raise UserError(
                f"{position} samples were taken, which are no whole batches of {size}: with "
                "data.window_shards a batch lies in one window",
                "the training.global_batch_samples that the run began with",
            )
        epoch, number, inside = self._find(position // size)
        samples = self.opened(number)
        seed = int(keyed(self.run.seed, np.array([number], dtype=np.uint64))[0])
        first = epoch * len(samples) + inside * size
        return Drawn(samples, sample_ids(seed, len(samples), first, size), {}, inside == 0)

    def _find(self, batch: int) -> tuple[int, int, int]:
        """The epoch and window of a batch, and the batches before it there."""
        while batch >= sum(self._batches) and len(self._batches) < self.count:
            self._next_batches()
        ends = list(accumulate(self._batches))
        epoch, batch = divmod(batch, ends[-1])
        number = bisect_right(ends, batch)
        return epoch, number, batch - (ends[number - 1] if number else 0)

    def _next_batches(self) -> int:
        """Open the next window; the whole batches in it."""
        number, size = len(self._batches), self.run.training.global_batch_samples
        manifest = self._manifest(number)
        shards.refuse_wrong_content(self.folder, manifest, *self._own_part)
        has_documents = bool(manifest.shards("train"))
        self._batches.append(len(self.opened(number)) // size if has_documents else 0)
        return self._batches[-1]

    def _open(self, number: int) -> Samples:
        source = source_samples(self.run.data, self.folder, "train", self._manifest(number))
        return Samples([source], "train")

    def _manifest(self, number: int) -> TokenManifest:
        """The shards of a window; those that are held out with the first one alone."""
        per_window, counts = self.run.data.window_shards or 1, self._text.shard_counts
        first = number * per_window
        last = min(first + per_window, counts["train"])
        held_out = range(0)
        if number == 0:
            of_same_documents = self.run.data.validation.fraction is not None
            held_out = range(last if of_same_documents else counts["validation"])
        return TokenManifest(
            **self._text.model_dump(),
            validation=[self._shard("validation", n) for n in held_out],
            train=[self._shard("train", n) for n in range(first, last)],
        )

    def _shard(self, split: Split, number: int) -> TokenShard:
        dtype = self._text.dtype
        count = self._text.shard_counts[split]
        return _awaited(
            lambda: shards.finished_shard(self.folder, split, number, dtype),
            self.wait,
            f"shard {number + 1} of {count} ({split}) of {self.folder}",
        )

    def _refuse_small_window(self) -> NoReturn:
        samples = len(self.opened(0)) if self._manifest(0).shards("train") else 0
        raise UserError(
            f"a window of {self.run.data.window_shards} shards has {samples} samples, a batch "
            f"takes {self.run.training.global_batch_samples}",
            "a larger data.window_shards, or a smaller training.global_batch_samples",
        )


def _plan(folder: Path) -> TokenPlan | None:
    """The plan of a text that is whole or under way, with the number of its shards."""
    plan = shards.read_plan(folder)
    if plan is None or plan.shard_counts:
        return plan
    if not shards.manifest_file(folder).is_file():
        return None  # of an earlier version: preparation writes it anew
    whole = shards.read_manifest(folder)
    counts = {"train": len(whole.train), "validation": len(whole.validation)}
    return plan.model_copy(update={"shard_counts": counts})


def _awaited(find: Callable[[], T | None], wait: Wait, missing: str) -> T:
    while (found := find()) is None:
        wait(missing)
    return found


def refuse_missing(missing: str) -> NoReturn:
    """A `Wait` where nobody prepares the text."""
    raise UserError(f"{missing} is missing", "run `atoll tokenize RUN_FOLDER`")


def waits_for_job(run_folder: Path, alive: Callable[[], None], log: Callable[[str], None]) -> Wait:
    """A `Wait` beside the job's own preparation, as long as that goes on.

    alive: called at each look; log: told of each thing that is waited for, once.
    """
    said, quiet_since = "", 0.0

    def wait(missing: str) -> None:
        nonlocal said, quiet_since
        state, now = preparation_state(run_folder), time.monotonic()
        if state == FAILED:
            raise UserError(
                f"{missing} is missing, and its preparation failed",
                f"mend what `atoll tokenize {run_folder}` says, and submit the same line again",
            )
        if run_dir.stop_file(run_folder).exists():
            raise TimeIsOver(
                f"the time of the job is nearly over, and {missing} is still being prepared",
                "submit the same line again: preparation goes on with what is whole",
            )
        if missing != said:
            log(f"waiting for {missing}: it is being prepared …")
            said, quiet_since = missing, now
        if state is not None:
            quiet_since = now
        elif now - quiet_since > SETTLE_SECONDS:
            refuse_missing(missing)
        alive()
        time.sleep(POLL_SECONDS)

    return wait


def wait_for_plan(run_folder: Path, wait: Wait) -> None:
    """Until the job's preparation says that the plan in the folder is of this run's text."""
    _awaited(lambda: preparation_state(run_folder) != STARTING or None, wait, "the plan of tokens")


def preparation_state(run_folder: Path) -> str | None:
    """What job.sh wrote of the preparation beside the ranks; None: there is none."""
    try:
        return run_dir.preparing_file(run_folder).read_text().strip()
    except FileNotFoundError:
        return None
