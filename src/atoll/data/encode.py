"""Blocks of text become tokens: what each tokenising process does."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from atoll.data import vocabulary
from atoll.data.keyed_hash import fractions, keyed
from atoll.data.shard_writer import TokenBlock
from atoll.data.shards import Split
from atoll.data.sources import blocks
from atoll.data.sources.blocks import Block
from atoll.data.sources.conversations import conversation_of, pair_of, words_of
from atoll.data.sources.corpus import Corpus
from atoll.data.sources.parts import naming
from atoll.data.sources.rows import Row
from atoll.data.vocabulary import Vocabulary
from atoll.errors import UserError
from atoll.settings import Classes, Data, Run

DOCUMENTS_PER_TRAINING_BLOCK = 64


@dataclass(frozen=True)
class SplitCorpus:
    """One corpus and the splits its documents go to."""

    corpus: Corpus
    splits: tuple[Split, ...]
    held_out_fraction: float
    seed: int

    def held_out(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Which documents are validation: chosen by number, so the same in every process."""
        if self.splits == ("train", "validation"):
            numbers = np.arange(first, first + count, dtype=np.uint64)
            return fractions(keyed(self.seed, numbers)) < self.held_out_fraction
        return np.full(count, self.splits == ("validation",))


class CorpusBlocks(NamedTuple):
    """A corpus with all of its blocks; shards are numbered within it."""

    source: SplitCorpus
    blocks: list[Block]

    @property
    def documents(self) -> int:
        return sum(block.documents for block in self.blocks)

    @property
    def shard_count(self) -> int:
        return self.blocks[-1].shard + 1


# what a tokenizer is made from: a source's settings, and its texts, the one to train on first
Text = tuple[Data, list[CorpusBlocks]]


class WorkItem(NamedTuple):
    """One block of the corpus of that number."""

    corpus: int
    block: Block


def encoder(
    tokenizer_file: Path,
    around: tuple[int | None, int | None],
    dtype: str,
    data: Data,
    sources: list[SplitCorpus],
) -> Callable[[WorkItem], dict[Split, TokenBlock]]:
    """Give the function that turns a block into tokens.

    around: the tokens that begin and end each document, None where there is none.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if data.classes is not None:
        tokenizer.enable_truncation(data.sequence_tokens, strategy="longest_first")

    def encode(item: WorkItem) -> dict[Split, TokenBlock]:
        source, block = sources[item.corpus], item.block
        columns = blocks.read(source.corpus, block)
        held_out = source.held_out(block.first_document, block.documents)
        encoded: dict[Split, TokenBlock] = {}
        for split in source.splits:
            chosen = np.flatnonzero(held_out == (split == "validation")).tolist()
            if data.classes is None:
                texts = [_filled(data.template, columns[0][n]) for n in chosen if columns[0][n]]
                encoded[split] = _encoded(tokenizer, around, dtype, texts, len(chosen))
            else:
                rows = [(block.first_document + n, *(c[n] for c in columns)) for n in chosen]
                encoded[split] = _labelled(tokenizer, dtype, data.classes, rows)
        return encoded

    return encode


def tokenizer_maker(run: Run, texts: list[Text], folder: Path) -> Callable[[None], Vocabulary]:
    """Give the function that loads or makes a run's tokenizer and saves it in `folder`."""

    def make(_: None) -> Vocabulary:
        if vocabulary.origin(run) is not None:
            made = vocabulary.load(run)
        elif run.tokenizer.kind == "characters":
            made = vocabulary.characters(_of_each(run, texts, _all_texts))
        else:
            train = vocabulary.TRAINED[run.tokenizer.kind]
            most = max(1, run.tokenizer.training_documents // len(texts))
            training = _of_each(run, texts, partial(_training_texts, most))
            made = train(training, run.tokenizer.vocabulary_tokens)
        template = run.tokenizer.chat_template
        vocabulary.add_tokens(made, run.tokenizer.add_tokens, template or "")
        if template is not None:
            made.chat_template = template
        vocabulary.save(made, folder)
        return vocabulary.describe(folder, run.data.bos)

    return make


def training_blocks(all_blocks: list[Block], documents: int) -> list[Block]:
    """Blocks to train a tokenizer on, evenly taken, that hold at least `documents` if there are."""
    if documents >= sum(block.documents for block in all_blocks):
        return all_blocks
    wanted = -(-documents // DOCUMENTS_PER_TRAINING_BLOCK)
    return all_blocks[:: max(1, len(all_blocks) // wanted)]


def _of_each(
    run: Run, texts: list[Text], read: Callable[[Data, list[CorpusBlocks]], Iterator[str]]
) -> Iterator[str]:
    """What is read of each text; of several sources a mistake names the one it is in."""
    for data, corpora in texts:
        with naming(data.name) if run.data.sources else nullcontext():
            yield from read(data, corpora)


def _all_texts(data: Data, corpora: list[CorpusBlocks]) -> Iterator[str]:
    for source, corpus_blocks in corpora:
        for block in corpus_blocks:
            yield from _texts(data, source.corpus, block)


def _training_texts(most: int, data: Data, corpora: list[CorpusBlocks]) -> Iterator[str]:
    """At most so many documents of the training split, an even share from each block."""
    train = corpora[0]
    documents = min(most, train.documents)
    chosen_blocks = training_blocks(train.blocks, documents)
    taken = 0
    for number, block in enumerate(chosen_blocks):
        share = documents * (number + 1) // len(chosen_blocks) - taken
        held_out = train.source.held_out(block.first_document, block.documents)
        texts = zip(_texts(data, train.source.corpus, block), held_out, strict=True)
        training_texts = [text for text, away in texts if text and not away]
        evenly = training_texts[:: max(1, len(training_texts) // max(1, share))][:share]
        taken += len(evenly)
        yield from (_filled(data.template, text) for text in evenly)


def _texts(data: Data, corpus: Corpus, block: Block) -> list[str]:
    """The texts of a block; of conversations, what is said in them."""
    first = blocks.read(corpus, block)[0]
    if not data.holds_conversations:
        return first
    return [_said(row, data) for row in first]


def _said(row: Row, data: Data) -> str:
    """What is said in a row's conversations; nothing in a blank one."""
    if not row.fields:
        return ""
    if data.format == "preference":
        return "\n".join(words_of(talk) for talk in pair_of(row.place, row.fields))
    return words_of(conversation_of(row.place, row.fields, data.text_field))


def _encoded(
    tokenizer: Any,
    around: tuple[int | None, int | None],
    dtype: str,
    texts: list[str],
    documents: int,
) -> TokenBlock:
    """Texts that are not blank, of so many documents."""
    pieces: list[bytes] = []
    lengths: list[int] = []
    begin, end = (np.array([] if t is None else [t], dtype=dtype).tobytes() for t in around)
    added = sum(token is not None for token in around)
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids = np.array(encoding.ids, dtype=dtype)
        pieces += (begin, ids.tobytes(), end)
        lengths.append(len(ids) + added)
    blank = documents - len(lengths)
    return TokenBlock(b"".join(pieces), np.array(lengths, dtype=np.int64), blank)


def _labelled(
    tokenizer: Any, dtype: str, classes: Classes, rows: list[tuple[Any, ...]]
) -> TokenBlock:
    """Rows of number, text, perhaps a second text, and label; with the model's special tokens."""
    labels = [_label(classes, row[0], row[-1]) for row in rows]
    inputs = [row[1] if len(row) == 3 else (row[1], str(row[2] or "")) for row in rows]
    encoded = [np.array(encoding.ids, dtype=dtype) for encoding in tokenizer.encode_batch(inputs)]
    # a blank one has no token where the tokenizer puts nothing around a text
    kept = [(ids, label) for ids, label in zip(encoded, labels, strict=True) if len(ids)]
    lengths = np.array([len(ids) for ids, _ in kept], dtype=np.int64)
    tokens = b"".join(ids.tobytes() for ids, _ in kept)
    kept_labels = np.array([label for _, label in kept], dtype=np.float32)
    return TokenBlock(tokens, lengths, len(rows) - len(kept), kept_labels)


def _label(classes: Classes, number: int, value: Any) -> float:
    """The label's index, or the score itself where there are no labels to choose from."""
    if value in classes.labels:
        return float(classes.labels.index(value))
    labels = len(classes.labels)
    label = _number(value) if isinstance(value, str) else value  # csv holds text alone
    if labels and isinstance(label, int) and 0 <= label < labels:
        return float(label)
    if not labels and isinstance(label, (int, float)) and math.isfinite(label):
        return float(label)
    known = f"; labels are 0 to {labels - 1} ({', '.join(classes.labels)})"
    raise UserError(
        f"row {number} has the label {value!r}{known if labels else ', which is no score'}",
        f"fix the row, or set data.classes.labels; field: {classes.label_field}",
    )


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _filled(template: str, text: str) -> str:
    return template.replace("{text}", text)
