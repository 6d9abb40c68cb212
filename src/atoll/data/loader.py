"""The dataloader: samples of a prepared folder, and a rank's batches, made ahead by one thread.

Legend: B samples of a microbatch, T tokens of a sample, S segments.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.data import shards
from atoll.data.batch import TENSORS, Batch
from atoll.data.mixture import Mixture, mixture
from atoll.data.order import rank_share, sample_ids
from atoll.data.pack import Ints, Packing, PackingPlan, joined, pack
from atoll.data.shards import Split, TokenManifest, TokenShard
from atoll.data.workers import in_order
from atoll.errors import UserError
from atoll.run_dir import prepared_sources
from atoll.settings import Data, Run

NO_TARGET = -100
# A split of more shards than this is read through a window of open files.
OPEN_SHARDS = 512
SHARES_AHEAD = 3


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch, and what the whole batch counts.

    epochs: of several sources, how often each was read through behind the batch.
    """

    microbatches: list[Batch]
    global_targets: int
    global_useful: int
    epochs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceSamples:
    """The split of one source: where it lies, and how its documents fill samples."""

    folder: Path
    manifest: TokenManifest
    plan: PackingPlan
    name: str = ""  # among several


class Samples:
    """The packed samples of one split; those of several sources stand end to end."""

    def __init__(
        self, sources: Sequence[SourceSamples], split: Split, is_pairs: bool = False
    ) -> None:
        first = sources[0].manifest
        self.plan = plan = joined(
            [source.plan for source in sources],
            [source.manifest.tokens(split) for source in sources],
        )
        self.sources = sources
        self._pad_id = first.pad_id
        self._targets, self._useful = plan.targets, plan.useful
        self._shards = [
            (source.folder, shard) for source in sources for shard in source.manifest.shards(split)
        ]
        self._classes = _classes(split, self._shards)
        if self._classes is not None:
            self._targets = np.ones_like(self._targets)
        self._shard_ends = np.cumsum([shard.tokens for _, shard in self._shards])
        dtype = np.dtype(first.dtype).newbyteorder("<")
        self._has_loss = any(shard.loss_sha256 is not None for _, shard in self._shards)

        @lru_cache(maxsize=OPEN_SHARDS)
        def tokens(number: int) -> npt.NDArray[np.unsignedinteger]:
            folder, shard = self._shards[number]
            path = shards.tokens_file(folder, split, shard.number)
            return np.memmap(path, dtype=dtype, mode="r")

        @lru_cache(maxsize=OPEN_SHARDS)
        def learned(number: int) -> npt.NDArray[np.unsignedinteger]:
            folder, shard = self._shards[number]
            if shard.loss_sha256 is None:  # a text beside conversations: all of it
                return np.broadcast_to(np.uint8(1), shard.tokens)
            path = shards.loss_file(folder, split, shard.number)
            return np.memmap(path, dtype=np.uint8, mode="r")

        self._tokens, self._learned = tokens, learned
        # of each pair: log-probabilities of both answers under the model that the run began with
        self.reference: npt.NDArray[np.float32] | None = None
        if is_pairs:
            self._targets = np.ones_like(self._targets)
        elif self._has_loss:
            self._targets = self._learned_targets()

    def __len__(self) -> int:
        return self.plan.samples

    @property
    def ids_of_sources(self) -> list[Ints]:
        """The samples of each source."""
        counts = [source.plan.samples for source in self.sources]
        return np.split(np.arange(len(self)), np.cumsum(counts)[:-1])

    def targets(self, ids: Ints) -> npt.NDArray[np.int32]:
        """What is predicted of each sample: so many tokens, or one label."""
        return self._targets[ids]

    def useful(self, ids: Ints) -> npt.NDArray[np.int32]:
        """The number of tokens of each sample that are not padding."""
        return self._useful[ids]

    def batch(self, ids: Ints) -> Batch:
        """The samples `ids` as one microbatch."""
        tokens_per_row = self.plan.sequence_tokens
        pieces, rows = self._pieces(ids)
        lengths = self.plan.piece_length[pieces].astype(np.int64)
        useful = self._useful[ids].astype(np.int64)
        row_begin = np.cumsum(useful) - useful
        begin = (
            np.cumsum(lengths) - lengths + (np.arange(len(ids)) * tokens_per_row - row_begin)[rows]
        )
        tokens = np.full(len(ids) * tokens_per_row, self._pad_id, dtype=np.int64)
        places = (begin, self.plan.piece_start[pieces], lengths)
        self._copy(tokens, self._tokens, *places)
        row_ends = (np.arange(len(ids)) + 1) * tokens_per_row
        ends = np.unique(np.concatenate([[0], begin + lengths, row_ends]))
        learned = np.ones_like(tokens)
        if self._has_loss:
            self._copy(learned, self._learned, *places)
        batch = _batch(tokens, learned, ends, useful, len(ids))
        if self.reference is not None:
            return replace(batch, reference_B2=torch.from_numpy(self.reference[ids]))
        if self._classes is None:
            return batch
        return replace(batch, classes_B=torch.from_numpy(self._classes[ids]))

    def _pieces(self, ids: Ints) -> tuple[Ints, Ints]:
        """The pieces of samples, in order, and the row each is in."""
        first = self.plan.sample_first_piece[ids]
        counts = self.plan.sample_first_piece[ids + 1] - first
        rows = np.repeat(np.arange(len(ids)), counts)
        before = np.cumsum(counts) - counts
        return np.arange(len(rows)) + (first - before)[rows], rows

    def _copy(
        self, out: Ints, shard: Callable[[int], Any], begin: Ints, start: Ints, lengths: Ints
    ) -> None:
        """Copy pieces of a stream of shards to their places; a piece lies in one shard."""
        numbers, inside = self._places(start)
        rows = np.stack([numbers, begin, inside, lengths], axis=1).tolist()
        for number, to, at, length in rows:
            out[to : to + length] = shard(number)[at : at + length]

    def _places(self, start: Ints) -> tuple[Ints, Ints]:
        """The shard that each piece begins in, and where in it."""
        numbers = np.searchsorted(self._shard_ends, start, side="right")
        return numbers, start - np.concatenate([[0], self._shard_ends])[numbers]

    def _learned_targets(self) -> npt.NDArray[np.int32]:
        """Of each sample, the tokens that are learned to be said; a piece's first is not."""
        numbers, inside = self._places(self.plan.piece_start)
        counts = np.zeros(len(inside), dtype=np.int64)
        for number in range(len(self._shards)):
            here = numbers == number
            if self._shards[number][1].loss_sha256 is None:
                counts[here] = self.plan.piece_length[here] - 1
                continue
            until = np.concatenate([[0], np.cumsum(self._learned(number), dtype=np.int64)])
            last = inside[here] + self.plan.piece_length[here]
            counts[here] = until[last] - until[inside[here] + 1]
        ends = np.concatenate([[0], np.cumsum(counts)])
        return np.diff(ends[self.plan.sample_first_piece]).astype(np.int32)


def open_samples(data: Data, folder: Path, split: Split) -> Samples:
    """The samples of a split of one text.

    Raises `UserError` naming an index that is damaged.
    """
    return Samples([_source_samples(data, folder, split)], split, data.format == "preference")


def samples_of(run: Run, split: Split) -> Samples:
    """The samples of a split of all sources of a run.

    Raises `UserError` as `open_samples` does.
    """
    data, folders = run.data, prepared_sources(run)
    if not data.sources:
        return open_samples(data, folders[0], split)
    sources = [
        _source_samples(own, folder, split, own.name)
        for own, folder in zip(data.each, folders, strict=True)
    ]
    return Samples(sources, split, data.format == "preference")


def mixture_of(samples: Samples, run: Run) -> Mixture | None:
    """The order of the training samples of several sources; None where there is one."""
    if not run.data.sources:
        return None
    return mixture(
        run.seed,
        run.training.global_batch_samples,
        run.data.curriculum,
        [int(samples.useful(ids).sum(dtype=np.int64)) for ids in samples.ids_of_sources],
        [len(ids) for ids in samples.ids_of_sources],
    )


def refuse_early_end(samples: Samples, run: Run, steps: int) -> None:
    """Raise `UserError` where a source would be read more often than it may be.

    Named with the step that its last pass ends before.
    """
    mixed, before = mixture_of(samples, run), run.training.consumed_samples
    if mixed is None:
        return
    size = run.training.global_batch_samples
    for number, source in enumerate(run.data.sources):
        most = source.max_epochs or math.inf
        epochs = mixed.epochs(before + size * steps)[number]
        if epochs > most:
            ends = bisect_right(
                range(steps), most, key=lambda step: mixed.epochs(before + size * step)[number]
            )
            shorter = f"training.steps={ends - 1}, a" if ends > 1 else "a"
            raise UserError(
                f"source {source.name} ends early: it has {mixed.source_samples[number]:,} "
                f"samples, and {steps} steps take it {epochs:.2f} times (max_epochs={most:g})",
                f"{shorter} smaller weight, or a higher max_epochs",
            )


def _source_samples(data: Data, folder: Path, split: Split, name: str = "") -> SourceSamples:
    """Plan the samples of a source.

    Takes about half a second for a million documents, so that no rank waits for another's plan.
    """
    manifest = shards.read_manifest(folder)
    lengths = [_document_tokens(folder, split, shard) for shard in manifest.shards(split)]
    if not lengths:
        raise UserError(
            f"the {split} split in {folder} holds no documents",
            f"delete {folder}, then run `atoll tokenize RUN_FOLDER`",
        )
    packing: Packing = data.packing if data.batching == "packing" else "padding"
    packing = "pairs" if data.format == "preference" else packing
    plan = pack(np.concatenate(lengths), data.sequence_tokens, packing)
    return SourceSamples(folder, manifest, plan, name)


@contextmanager
def batches_ahead(
    samples: Samples, run: Run, position: int, steps: int, rank: int
) -> Iterator[Iterator[Share]]:
    """Give the shares of one data rank for `steps` global batches, made ahead by a thread.

    `position` is how many samples of the endless order have been consumed, by all ranks. An
    error of the thread is raised where its share is asked for.
    """
    pin = torch.cuda.is_available()
    size, microbatch = run.training.global_batch_samples, run.training.microbatch_samples
    mixed = mixture_of(samples, run)
    names = [source.name for source in samples.sources]

    def share(step: int) -> Share:
        first = position + step * size
        if mixed is None:
            ids, epochs = sample_ids(run.seed, len(samples), first, size), {}
        else:
            ids = mixed.ids(first, size)
            epochs = dict(zip(names, mixed.epochs(first + size), strict=True))
        own = rank_share(ids, rank, run.axes.data, microbatch)
        batches = [samples.batch(part) for part in own]
        return Share(
            [_pinned(batch) for batch in batches] if pin else batches,
            int(samples.targets(ids).sum()),
            int(samples.useful(ids).sum()),
            epochs,
        )

    with ThreadPoolExecutor(1, "batches-ahead") as pool:
        try:
            yield in_order(pool, share, range(steps), SHARES_AHEAD)
        finally:
            pool.shutdown(cancel_futures=True)


def _document_tokens(folder: Path, split: Split, shard: TokenShard) -> Ints:
    path = shards.index_file(folder, split, shard.number)
    ends = np.fromfile(path, dtype="<u8").astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    if len(ends) != shard.documents or ends[-1] != shard.tokens or lengths.min() <= 0:
        raise UserError(
            f"{path} is corrupted: its document ends do not add up to {shard.tokens} tokens of "
            f"{shard.documents} documents",
            "delete it, then run `atoll tokenize RUN_FOLDER`: only it is made again",
        )
    return lengths


def _classes(
    split: Split, shards_of_split: list[tuple[Path, TokenShard]]
) -> npt.NDArray[np.float32] | None:
    """The label of each document, where they have one; with labels a document is a sample."""
    if not shards_of_split or shards_of_split[0][1].labels_sha256 is None:
        return None
    paths = [shards.labels_file(folder, split, shard.number) for folder, shard in shards_of_split]
    return np.concatenate([np.fromfile(path, dtype="<f4") for path in paths]).astype(np.float32)


def _batch(tokens: Ints, learned: Ints, ends: Ints, useful: Ints, rows: int) -> Batch:
    """Labels and positions from the borders of segments; nothing is predicted across one.

    learned: 1 where a token is a target of the one before it.
    """
    lengths = np.diff(ends)
    positions = np.arange(len(tokens)) - np.repeat(ends[:-1], lengths)
    labels = np.full_like(tokens, NO_TARGET)
    labels[:-1] = np.where(learned[1:], tokens[1:], NO_TARGET)
    labels[ends[1:] - 1] = NO_TARGET
    columns = np.arange(len(tokens) // rows)
    labels.reshape(rows, -1)[columns >= useful[:, None]] = NO_TARGET
    return Batch(
        tokens_BT=torch.from_numpy(tokens.reshape(rows, -1)),
        labels_BT=torch.from_numpy(labels.reshape(rows, -1)),
        positions_BT=torch.from_numpy(positions.reshape(rows, -1)),
        segment_ends=torch.from_numpy(ends.astype(np.int32)),
        segment_lengths=tuple(lengths.tolist()),
        useful_tokens=int(useful.sum()),
    )


def _pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory, which a device copies from while it computes."""
    tensors = {name: getattr(batch, name) for name in TENSORS}
    return replace(batch, **{n: x.pin_memory() for n, x in tensors.items() if x is not None})
