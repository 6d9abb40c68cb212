"""Blocks of text become tokens: what each tokenising process does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from atoll.data import sources, vocabulary
from atoll.data.keyed_hash import fractions, keyed
from atoll.data.shards import Split
from atoll.data.sources import Block, Input
from atoll.data.vocabulary import Vocabulary
from atoll.settings import Run

DOCUMENTS_PER_TRAINING_BLOCK = 64


@dataclass(frozen=True)
class Reading:
    """One input and the splits its documents go to."""

    text: Input
    splits: tuple[Split, ...]
    held_out_fraction: float
    seed: int

    def held_out(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Which documents are validation: chosen by number, so the same in every process."""
        if self.splits == ("train", "validation"):
            numbers = np.arange(first, first + count, dtype=np.uint64)
            return fractions(keyed(self.seed, numbers)) < self.held_out_fraction
        return np.full(count, self.splits == ("validation",))


class Job(NamedTuple):
    """One block of the reading of that number."""

    reading: int
    block: Block


class Encoded(NamedTuple):
    """Documents of one split: their tokens end to end, the length of each, the blank ones."""

    tokens: bytes
    lengths: npt.NDArray[np.int64]
    blank: int


def encoder(
    tokenizer_file: Path, end_id: int, dtype: str, template: str, readings: list[Reading]
) -> Callable[[Job], dict[Split, Encoded]]:
    """Give the function that turns a block into tokens, each document closed by `end_id`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(job: Job) -> dict[Split, Encoded]:
        reading, block = readings[job.reading], job.block
        texts = sources.texts(reading.text, block)
        held_out = reading.held_out(block.first_document, block.documents)
        chosen: dict[Split, list[str]] = {
            split: [
                text
                for text, away in zip(texts, held_out, strict=True)
                if away == (split == "validation")
            ]
            for split in reading.splits
        }
        return {
            split: _encoded(tokenizer, end_id, dtype, template, found)
            for split, found in chosen.items()
        }

    return encode


def tokenizer_maker(
    run: Run, reading: Reading, blocks: list[Block], documents: int, folder: Path
) -> Callable[[None], Vocabulary]:
    """Give the function that loads or trains a run's tokenizer and saves it in `folder`."""

    def make(_: None) -> Vocabulary:
        if vocabulary.origin(run) is None:
            texts = _training_texts(run, reading, blocks, documents)
            made = vocabulary.trained(texts, run.tokenizer.vocabulary_tokens)
        else:
            made = vocabulary.load(run)
        vocabulary.save(made, folder)
        return vocabulary.describe(folder)

    return make


def training_blocks(blocks: list[Block], documents: int) -> list[Block]:
    """Blocks to train a tokenizer on, evenly taken, that hold at least `documents` if there are."""
    if documents >= sum(block.documents for block in blocks):
        return blocks
    wanted = -(-documents // DOCUMENTS_PER_TRAINING_BLOCK)
    return blocks[:: max(1, len(blocks) // wanted)]


def _training_texts(
    run: Run, reading: Reading, blocks: list[Block], documents: int
) -> Iterator[str]:
    """At most `documents` documents of the training split, an even share from each block."""
    taken = 0
    for number, block in enumerate(blocks):
        share = documents * (number + 1) // len(blocks) - taken
        held_out = reading.held_out(block.first_document, block.documents)
        texts = zip(sources.texts(reading.text, block), held_out, strict=True)
        found = [text for text, away in texts if text and not away]
        evenly = found[:: max(1, len(found) // max(1, share))][:share]
        taken += len(evenly)
        yield from (_filled(run.data.template, text) for text in evenly)


def _encoded(tokenizer: Any, end_id: int, dtype: str, template: str, texts: list[str]) -> Encoded:
    pieces: list[bytes] = []
    lengths: list[int] = []
    end = np.array([end_id], dtype=dtype).tobytes()
    filled = [_filled(template, text) for text in texts if text]
    for encoding in tokenizer.encode_batch_fast(filled, add_special_tokens=False):
        ids = np.array(encoding.ids, dtype=dtype)
        pieces += (ids.tobytes(), end)
        lengths.append(len(ids) + 1)
    blank = len(texts) - len(lengths)
    return Encoded(b"".join(pieces), np.array(lengths, dtype=np.int64), blank)


def _filled(template: str, text: str) -> str:
    return template.replace("{text}", text)
