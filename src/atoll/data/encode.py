"""Blocks of text become tokens: what each tokenising process does."""

import math
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
from atoll.errors import UserError
from atoll.settings import Classes, Data, Run

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


class Text(NamedTuple):
    """A reading with all of its blocks."""

    reading: Reading
    blocks: list[Block]


class Encoded(NamedTuple):
    """Documents of one split: their tokens end to end, the length of each, the blank ones."""

    tokens: bytes
    lengths: npt.NDArray[np.int64]
    blank: int
    labels: npt.NDArray[np.float32] | None = None


def encoder(
    tokenizer_file: Path, end_id: int | None, dtype: str, data: Data, readings: list[Reading]
) -> Callable[[Job], dict[Split, Encoded]]:
    """Give the function that turns a block into tokens, each document closed by `end_id`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if data.classes is not None:
        tokenizer.enable_truncation(data.sequence_tokens, strategy="longest_first")

    def encode(job: Job) -> dict[Split, Encoded]:
        reading, block = readings[job.reading], job.block
        texts = sources.texts(reading.text, block)
        held_out = reading.held_out(block.first_document, block.documents)
        chosen = {
            split: np.flatnonzero(held_out == (split == "validation")).tolist()
            for split in reading.splits
        }
        if data.classes is not None:
            rows = sources.others(reading.text, block)
            return {
                split: _labelled(
                    tokenizer,
                    dtype,
                    data.classes,
                    [(block.first_document + n, texts[n], *rows[n]) for n in numbers],
                )
                for split, numbers in chosen.items()
            }
        return {
            split: _encoded(tokenizer, end_id, dtype, data.template, [texts[n] for n in numbers])
            for split, numbers in chosen.items()
        }

    return encode


def tokenizer_maker(run: Run, texts: list[Text], folder: Path) -> Callable[[None], Vocabulary]:
    """Give the function that loads or makes a run's tokenizer and saves it in `folder`."""

    def make(_: None) -> Vocabulary:
        if vocabulary.origin(run) is not None:
            made = vocabulary.load(run)
        elif run.tokenizer.kind == "characters":
            made = vocabulary.characters(_all_texts(texts))
        else:
            train = vocabulary.TRAINED[run.tokenizer.kind]
            made = train(_training_texts(run, texts[0]), run.tokenizer.vocabulary_tokens)
        vocabulary.save(made, folder)
        return vocabulary.describe(folder)

    return make


def training_blocks(blocks: list[Block], documents: int) -> list[Block]:
    """Blocks to train a tokenizer on, evenly taken, that hold at least `documents` if there are."""
    if documents >= sum(block.documents for block in blocks):
        return blocks
    wanted = -(-documents // DOCUMENTS_PER_TRAINING_BLOCK)
    return blocks[:: max(1, len(blocks) // wanted)]


def _all_texts(texts: list[Text]) -> Iterator[str]:
    for reading, blocks in texts:
        for block in blocks:
            yield from sources.texts(reading.text, block)


def _training_texts(run: Run, text: Text) -> Iterator[str]:
    """Some documents of the training split, an even share from each block."""
    reading = text.reading
    documents = min(run.tokenizer.training_documents, sum(b.documents for b in text.blocks))
    blocks = training_blocks(text.blocks, documents)
    taken = 0
    for number, block in enumerate(blocks):
        share = documents * (number + 1) // len(blocks) - taken
        held_out = reading.held_out(block.first_document, block.documents)
        texts = zip(sources.texts(reading.text, block), held_out, strict=True)
        found = [text for text, away in texts if text and not away]
        evenly = found[:: max(1, len(found) // max(1, share))][:share]
        taken += len(evenly)
        yield from (_filled(run.data.template, text) for text in evenly)


def _encoded(
    tokenizer: Any, end_id: int | None, dtype: str, template: str, texts: list[str]
) -> Encoded:
    pieces: list[bytes] = []
    lengths: list[int] = []
    end = np.array([] if end_id is None else [end_id], dtype=dtype)
    filled = [_filled(template, text) for text in texts if text]
    for encoding in tokenizer.encode_batch_fast(filled, add_special_tokens=False):
        ids = np.array(encoding.ids, dtype=dtype)
        pieces += (ids.tobytes(), end.tobytes())
        lengths.append(len(ids) + len(end))
    blank = len(texts) - len(lengths)
    return Encoded(b"".join(pieces), np.array(lengths, dtype=np.int64), blank)


def _labelled(tokenizer: Any, dtype: str, classes: Classes, rows: list[tuple[Any, ...]]) -> Encoded:
    """Rows of number, text, perhaps a second text, and label; with the model's special tokens."""
    labels = [_label(classes, row[0], row[-1]) for row in rows]
    inputs = [row[1] if len(row) == 3 else (row[1], str(row[2] or "")) for row in rows]
    ids = [np.array(found.ids, dtype=dtype) for found in tokenizer.encode_batch(inputs)]
    lengths = np.array([len(one) for one in ids], dtype=np.int64)
    tokens = b"".join(one.tobytes() for one in ids)
    return Encoded(tokens, lengths, 0, np.array(labels, dtype=np.float32))


def _label(classes: Classes, number: int, value: Any) -> float:
    """The label's index, or the score itself where there are no labels to choose from."""
    hint = f"fix the row, or set data.classes.labels; field: {classes.label_field}"
    if not classes.labels:
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
        raise UserError(f"row {number} has the label {value!r}, which is no score", hint)
    if isinstance(value, str) and value in classes.labels:
        return float(classes.labels.index(value))
    if isinstance(value, int) and 0 <= value < len(classes.labels):
        return float(value)
    known = f"0 to {len(classes.labels) - 1} ({', '.join(classes.labels)})"
    raise UserError(f"row {number} has the label {value!r}; labels are {known}", hint)


def _filled(template: str, text: str) -> str:
    return template.replace("{text}", text)
