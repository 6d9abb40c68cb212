"""The samples of a prepared folder: which tokens each is made of, and microbatches of them.

Legend: B samples of a microbatch, T tokens of a sample, S segments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.data import shards
from atoll.data.batch import Batch
from atoll.data.pack import Ints, Packing, PackingPlan, joined, pack
from atoll.data.shards import Split, TokenManifest, TokenShard
from atoll.errors import UserError
from atoll.run_dir import prepared_sources
from atoll.settings import Data, Run

NO_TARGET = -100
# A split of more shards than this is read through a window of open files.
OPEN_SHARDS = 512


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
            shards.refuse_other_shard(folder, split, shard, first.dtype)
            path = shards.tokens_file(folder, split, shard.number)
            return np.memmap(path, dtype=dtype, mode="r")

        @lru_cache(maxsize=OPEN_SHARDS)
        def learned(number: int) -> npt.NDArray[np.unsignedinteger]:
            folder, shard = self._shards[number]
            if shard.loss_sha256 is None:  # a text beside conversations: all of it
                return np.broadcast_to(np.uint8(1), shard.tokens)
            shards.refuse_other_shard(folder, split, shard, first.dtype)
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

    @property
    def cut_tokens(self) -> int:
        """Of documents longer than a sample, what is behind it: in none, where each has one."""
        held = sum(shard.tokens for _, shard in self._shards)
        return held - int(self._useful.sum(dtype=np.int64))

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
    source = source_samples(data, folder, split, shards.read_manifest(folder))
    return Samples([source], split, data.format == "preference")


def samples_of(run: Run, split: Split) -> Samples:
    """The samples of a split of all sources of a run.

    Raises `UserError` as `open_samples` does.
    """
    data, folders = run.data, prepared_sources(run)
    if not data.sources:
        return open_samples(data, folders[0], split)
    sources = [
        source_samples(own, folder, split, shards.read_manifest(folder), own.name)
        for own, folder in zip(data.each, folders, strict=True)
    ]
    return Samples(sources, split, data.format == "preference")


def source_samples(
    data: Data, folder: Path, split: Split, manifest: TokenManifest, name: str = ""
) -> SourceSamples:
    """Plan the samples of a source.

    Takes about half a second for a million documents, so that no rank waits for another's plan.
    """
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
