"""Samples in windows of shards, so that training begins while the rest of its text is prepared.

A window is `data.window_shards` shards in a row of one text. Its documents are packed by
themselves, its samples are drawn in an order of their own, and windows follow one another. Several
texts are mixed as whole ones are, each read window by window. So the order depends on the settings
and the text alone, whatever was ready when.
"""

from bisect import bisect_right
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atoll import run_dir
from atoll.data import shards
from atoll.data.keyed_hash import keyed
from atoll.data.mixture import mixture_of
from atoll.data.order import sample_ids
from atoll.data.pack import Ints
from atoll.data.samples import Samples, SourceSamples, source_samples
from atoll.data.shards import Split, TokenManifest, TokenPlan, TokenShard
from atoll.data.waits import Wait, awaited
from atoll.errors import UserError
from atoll.settings import Run


class Drawn(NamedTuple):
    """A global batch: the samples that hold it, which of them, and epochs of each source.

    opens_window: it is the first to need a window, which ranks may have to wait for.
    """

    samples: Samples
    ids: Ints
    epochs: dict[str, float]
    opens_window: bool = False


class Place(NamedTuple):
    """Of a position in the endless order of a text."""

    epoch: int
    window: int
    inside: int  # samples of the window before it


class TextWindows:
    """The training samples of one text, window by window; of use to one thread at a time.

    Raises `UserError` where a shard is missing and `wait` says that nobody makes it, or one is
    corrupted.
    """

    def __init__(self, run: Run, folder: Path, wait: Wait, own_part: tuple[int, int]) -> None:
        assert run.data.window_shards is not None
        self.data, self.seed, self.folder, self.wait = run.data, run.order_seed, folder, wait
        self._own_part, self._per_window = own_part, run.data.window_shards
        self.text = awaited(lambda: _plan(folder), wait, f"{folder}/plan.json")
        shards.refuse_wrong_tokenizer(folder, self.text)
        self.count = -(-self.text.shard_counts["train"] // self._per_window)
        self.ends = [0]  # of the windows looked at so far: the samples up to the end of each
        self.opened = lru_cache(maxsize=2)(self._open)

    def find(self, position: int) -> Place:
        """The epoch and window behind so many samples of the endless order; waits for it."""
        while position >= self.ends[-1] and len(self.ends) <= self.count:
            self._look_at_next()
        if not self.ends[-1]:
            raise UserError(
                f"the train split in {self.folder} holds no documents",
                f"delete {self.folder}, then run `atoll tokenize RUN_FOLDER`",
            )
        epoch, rest = divmod(position, self.ends[-1])
        window = bisect_right(self.ends, rest) - 1
        return Place(epoch, window, rest - self.ends[window])

    def take(self, position: int, count: int) -> list[tuple[int, Ints]]:
        """The next samples of the endless order: of each window in turn, which of its own."""
        parts = []
        while count:
            epoch, window, inside = self.find(position)
            size = self.size(window)
            taken = min(count, size - inside)
            seed = int(keyed(self.seed, np.array([window], dtype=np.uint64))[0])
            parts.append((window, sample_ids(seed, size, epoch * size + inside, taken)))
            position, count = position + taken, count - taken
        return parts

    def epochs(self, position: int) -> float:
        """How often the text was read through before a position, its shards as equal parts."""
        if position == 0:
            return 0.0
        epoch, window, inside = self.find(position - 1)
        first, last = self._train_shards(window)
        read = first + (last - first) * (inside + 1) / self.size(window)
        return epoch + read / self.text.shard_counts["train"]

    def size(self, window: int) -> int:
        """The samples of a window that was looked at."""
        return self.ends[window + 1] - self.ends[window]

    def manifest(self, window: int) -> TokenManifest:
        """The shards of a window; those that are held out with the first one alone."""
        first, last = self._train_shards(window)
        held_out = range(0)
        if window == 0:
            of_same_documents = self.data.validation.fraction is not None
            held_out = range(last if of_same_documents else self.text.shard_counts["validation"])
        return TokenManifest(
            **self.text.model_dump(),
            validation=[self._shard("validation", n) for n in held_out],
            train=[self._shard("train", n) for n in range(first, last)],
        )

    def held_out(self) -> SourceSamples:
        """Held-out documents of the first window's shards, or all where they have their own files.

        Raises `UserError` where those hold out nothing.
        """
        manifest = self.manifest(0)
        if not manifest.documents("validation"):
            raise UserError(
                f"the first window ({self._per_window} shards) of {self.folder} holds out no "
                "document",
                "a larger data.window_shards, or data.validation.files",
            )
        return source_samples(self.data, self.folder, "validation", manifest, self.data.name)

    def _train_shards(self, window: int) -> tuple[int, int]:
        first = window * self._per_window
        return first, min(first + self._per_window, self.text.shard_counts["train"])

    def _look_at_next(self) -> None:
        window = len(self.ends) - 1
        manifest = self.manifest(window)
        shards.refuse_wrong_content(self.folder, manifest, *self._own_part)
        samples = self.opened(window).plan.samples if manifest.shards("train") else 0
        self.ends.append(self.ends[-1] + samples)

    def _open(self, window: int) -> SourceSamples:
        manifest = self.manifest(window)
        return source_samples(self.data, self.folder, "train", manifest, self.data.name)

    def _shard(self, split: Split, number: int) -> TokenShard:
        find = partial(shards.finished_shard, self.folder, split, number, self.text.dtype)
        count = self.text.shard_counts[split]
        shard = awaited(
            find, self.wait, f"shard {number + 1} of {count} ({split}) of {self.folder}"
        )
        shards.refuse_other_plan(self.folder, self.text)
        return shard


class Windows:
    """The training samples of one text or several; of use to one thread at a time.

    Raises `UserError` as `TextWindows` does, and where texts are of different tokenizers.
    """

    def __init__(self, run: Run, wait: Wait, rank: int = 0, world_size: int = 1) -> None:
        self.run, part = run, (rank, world_size)
        own = zip(run_dir.source_runs(run), run_dir.prepared_sources(run), strict=True)
        self.texts = [TextWindows(source, folder, wait, part) for source, folder in own]
        for text in self.texts:
            shards.refuse_wrong_tokenizer(run_dir.prepared(run), text.text)
        self._size = run.training.global_batch_samples
        self._joined = lru_cache(maxsize=2)(self._join)
        first = self._join(tuple((n, text.find(0).window) for n, text in enumerate(self.texts)))
        self.plan = first.plan  # how documents of the first windows fill their samples
        # how many tokens a sample of a text has is taken from there
        self.order = mixture_of(first, run)

    @property
    def manifest(self) -> TokenManifest:
        """Of the first window of the first text."""
        return self.texts[0].manifest(0)

    def validation(self) -> Samples:
        """What each text holds out, of its first window's shards or of its own files."""
        return Samples([text.held_out() for text in self.texts], "validation")

    def draw(self, position: int) -> Drawn:
        """The global batch behind so many samples of the endless order; waits for its windows."""
        looked_at = self._looked_at()
        sources, before = self.order.sources_at(position, self._size), self.order.consumed(position)
        parts = []
        for number, text in enumerate(self.texts):
            places = np.flatnonzero(sources == number)
            for window, own in text.take(before[number], len(places)):
                parts.append(((number, window), places[: len(own)], own))
                places = places[len(own) :]
        held = tuple(sorted({key for key, _, _ in parts}))
        samples = self._joined(held)
        ids_of = dict(zip(held, samples.ids_of_sources, strict=True))
        ids = np.empty(self._size, dtype=np.int64)
        for key, places, own in parts:
            ids[places] = ids_of[key][own]
        epochs = self._epochs(position + self._size)
        return Drawn(samples, ids, epochs, self._looked_at() > looked_at)

    def _join(self, windows: tuple[tuple[int, int], ...]) -> Samples:
        """The samples of windows, each of a text of this number, end to end."""
        return Samples([self.texts[text].opened(window) for text, window in windows], "train")

    def _looked_at(self) -> int:
        return sum(len(text.ends) for text in self.texts)

    def _epochs(self, position: int) -> dict[str, float]:
        """Of each of several sources, behind so many samples."""
        if not self.run.data.sources:
            return {}
        consumed = self.order.consumed(position)
        each = zip(self.texts, consumed, strict=True)
        return {text.data.name: text.epochs(samples) for text, samples in each}


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
