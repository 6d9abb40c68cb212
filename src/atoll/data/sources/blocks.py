"""A corpus cut into blocks: ranges of documents that depend on the text alone.

So any number of workers makes the same shards, and a block is read, wherever it lies, without
what stands before it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np

from atoll.data.sources import columns, rows, text_files
from atoll.data.sources.corpus import Corpus
from atoll.data.sources.parts import Columns, Ends, Part, Span
from atoll.data.workers import in_order
from atoll.errors import UserError

# Enough work to hide the message to a worker, small enough to keep many workers busy to the end.
BLOCK_DOCUMENTS = 2048
BLOCK_BYTES = 512 << 10
PARTS_AHEAD = 16


class Block(NamedTuple):
    """Consecutive documents of one shard, and where they lie."""

    shard: int
    first_document: int
    documents: int
    spans: tuple[Span, ...]


class Format(NamedTuple):
    """Where the documents of one kind of part end, and how a span of them is read."""

    ends: Callable[[Part], Ends]
    read: Callable[[Part, Span], Columns]


FORMATS = {
    "source": Format(text_files.file_ends, text_files.read_source),
    "txt-file": Format(text_files.file_ends, text_files.read_file),
    "txt-paragraph": Format(text_files.paragraph_ends, text_files.read_paragraphs),
    "txt-line": Format(text_files.line_ends, text_files.read_lines),
    "jsonl": Format(text_files.line_ends, text_files.read_jsonl),
    "csv": Format(text_files.record_ends, text_files.read_csv),
    "tsv": Format(text_files.record_ends, text_files.read_csv),
    "csv-plain": Format(text_files.record_ends, text_files.read_csv),
    "tsv-plain": Format(text_files.record_ends, text_files.read_csv),
    "parquet": Format(columns.parquet_ends, columns.read_parquet),
    "arrow": Format(columns.arrow_ends, columns.read_arrow),
    "hub": Format(columns.hub_ends, columns.read_hub),
    "chat-jsonl": Format(text_files.line_ends, rows.read_jsonl),
    "chat-parquet": Format(columns.parquet_ends, rows.columnar(columns.read_parquet)),
    "chat-arrow": Format(columns.arrow_ends, rows.columnar(columns.read_arrow)),
    "chat-hub": Format(columns.hub_ends, rows.columnar(columns.read_hub)),
}


def blocks(corpus: Corpus, documents_per_shard: int) -> Iterator[Block]:
    """Cut a corpus into blocks; no block crosses the border of a shard."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        ends = in_order(pool, _ends, corpus.parts, PARTS_AHEAD)
        yield from cut(ends, documents_per_shard, corpus.max_documents or 1 << 62)


def cut(
    ends_of_parts: Iterable[Ends], documents_per_shard: int, max_documents: int
) -> Iterator[Block]:
    """Cut parts, given the byte at which each of their documents ends, into blocks."""
    first, spans = 0, list[Span]()
    documents, size = 0, 0
    for part, ends in enumerate(ends_of_parts):
        done = 0
        while done < len(ends) and first + documents < max_documents:
            start = int(ends[done - 1]) if done else 0
            to_border = documents_per_shard - (first + documents) % documents_per_shard
            room = min(BLOCK_DOCUMENTS - documents, to_border, max_documents - first - documents)
            limit = start + BLOCK_BYTES - size
            fitting = int(np.searchsorted(ends[done : done + room], limit, side="right"))
            # A document larger than a block is a block of its own.
            taken = max(fitting, int(documents == 0))
            if taken:
                stop = int(ends[done + taken - 1])
                spans.append(Span(part, done, taken, start, stop))
                documents, size, done = documents + taken, size + stop - start, done + taken
            at_border = (first + documents) % documents_per_shard == 0
            if not taken or at_border or documents >= BLOCK_DOCUMENTS or size >= BLOCK_BYTES:
                yield Block(first // documents_per_shard, first, documents, tuple(spans))
                first, spans = first + documents, []
                documents, size = 0, 0
    if documents:
        yield Block(first // documents_per_shard, first, documents, tuple(spans))


def read(corpus: Corpus, block: Block) -> Columns:
    """The columns of a block: its texts, then those of the parts' other fields.

    A text that is blank or unreadable by choice is an empty string. Of conversations the one
    column holds a `Row` each.
    """
    columns_of_spans = [_read_span(corpus.parts[span.part], span) for span in block.spans]
    texts, *others = ([*chain(*spans)] for spans in zip(*columns_of_spans, strict=True))
    return [["" if isinstance(text, str) and text.isspace() else text for text in texts], *others]


def _read_span(part: Part, span: Span) -> Columns:
    columns_of_span = FORMATS[part.format].read(part, span)
    documents = len(columns_of_span[0])
    if documents != span.documents:
        raise UserError(
            f"{part.path} changed while it was read: {documents} documents where "
            f"{span.documents} were counted",
            "wait until the file is complete, then run `atoll tokenize` again",
        )
    return columns_of_span


def _ends(part: Part) -> Ends:
    return FORMATS[part.format].ends(part)
