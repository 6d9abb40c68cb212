"""Documents of text files: their exact places in bytes, and how such a range is read.

`..._ends` gives the byte at which each document of a file ends; `read_...` the columns of a span.
"""

import csv
import io
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from atoll.data.sources.parts import Columns, Ends, Part, Span, refuse_missing_columns
from atoll.errors import UserError

# Paragraphs stand between blank lines; the indentation of the next line is its own.
BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
BLANK_LINES_BYTES = re.compile(BLANK_LINES.pattern.encode())
SCAN_BYTES = 16 << 20
NUL_SAMPLE_BYTES = 4096
LARGEST_DOCUMENT_BYTES = 1 << 30
DELIMITERS = {"csv": ",", "tsv": "\t"}
# what a line has that holds half of a character, and others have too: \ud5c8 is a whole one
MAY_BE_HALF = (b"\\ud", b"\\uD", b"\xed")


def file_ends(part: Part) -> Ends:
    """A whole file is one document. Raises `UserError` for one that no memory is enough for."""
    size = part.path.stat().st_size
    if size > LARGEST_DOCUMENT_BYTES:
        raise UserError(
            f"{part.path} would be one document of {size / 2**30:.1f} GiB: its tokens are made in "
            "one piece, in some ten times as much memory",
            "set data.document=line or paragraph, or split it into files of up to "
            f"{LARGEST_DOCUMENT_BYTES >> 30} GiB",
        )
    return np.array([size], dtype=np.int64)


def line_ends(part: Part) -> Ends:
    """A line is one document."""
    ends, size, last = [np.zeros(0, dtype=np.int64)], 0, b"\n"
    with part.path.open("rb") as file:
        while piece := file.read(SCAN_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(piece, dtype=np.uint8) == 10) + size + 1)
            size, last = size + len(piece), piece[-1:]
    return np.concatenate([*ends, np.array([size] if last != b"\n" else [], dtype=np.int64)])


def paragraph_ends(part: Part) -> Ends:
    """A paragraph, up to and with the blank lines after it, is one document."""
    with part.path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return np.zeros(0, dtype=np.int64)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            ends = [match.end() for match in BLANK_LINES_BYTES.finditer(text)]
    return np.unique(np.array([*ends, size], dtype=np.int64))


def record_ends(part: Part) -> Ends:
    """A record of a csv file is one document, the header a part of the first; lines may be quoted.

    Every record is held against the header here, where the number of its line is known.
    """
    ends, size = [], 0

    def lines() -> Iterator[str]:
        nonlocal size
        for line in file:
            size += len(line)
            yield line.decode("latin-1")  # only the places of ASCII characters matter here

    with part.path.open("rb") as file:
        records = _csv_reader(lines(), part.format)
        try:
            columns = _csv_columns(part.path, part.format)
            refuse_missing_columns(part.path, columns, part.fields)
            for record in records:
                if record and len(record) != len(columns):
                    raise csv.Error(f"{len(record)} fields where the header has {len(columns)}")
                if record:
                    ends.append(size)
        except csv.Error as error:
            raise UserError(
                f"{part.path}:{max(1, records.line_num)}: not {part.path.suffix[1:]}: {error}",
                "fix the record: a field that holds a quote, a line end or the delimiter stands in "
                'quotes, and a quote in it is written twice (""). Where a quote is a character as '
                "any other: data.quotes=false",
            ) from None
    return np.array(ends[1:], dtype=np.int64)


def read_file(part: Part, span: Span) -> Columns:
    text = _text(part, span)
    begin, end = (int(len(text) * share) for share in part.share)
    return [[text[begin:end]]]


def read_source(part: Part, span: Span) -> Columns:
    """A source file; one in another encoding than UTF-8 is left out."""
    try:
        return [[read_bytes(part, span).decode()]]
    except UnicodeDecodeError:
        return [[""]]


def read_lines(part: Part, span: Span) -> Columns:
    lines = _text(part, span).removesuffix("\n").split("\n")
    return [[line.removesuffix("\r") for line in lines]]


def read_paragraphs(part: Part, span: Span) -> Columns:
    paragraphs = BLANK_LINES.split(_text(part, span))
    if len(paragraphs) == span.documents + 1 and not paragraphs[-1]:
        paragraphs.pop()
    return [[paragraph.rstrip("\r\n") for paragraph in paragraphs]]


def read_jsonl(part: Part, span: Span) -> Columns:
    """The fields of each line; a blank line is an empty document."""
    lines = read_bytes(part, span).removesuffix(b"\n").split(b"\n")
    rows = [_jsonl_row(part, number, line) for number, line in enumerate(lines, span.first + 1)]
    return [list(column) for column in zip(*rows, strict=True)]


def read_csv(part: Part, span: Span) -> Columns:
    """The fields of each record; blank lines between records are none."""
    records = filter(None, _csv_reader(io.StringIO(_text(part, span), "\n"), part.format))
    rows = list(records)[span.first == 0 :]
    columns = _kept_csv_columns(part.path, part.format)
    return [[row[columns.index(field)] for row in rows] for field in part.fields]


def read_bytes(part: Part, span: Span) -> bytes:
    with part.path.open("rb") as file:
        file.seek(span.start)
        return file.read(span.stop - span.start)


def refuse_half_characters(where: str, line: bytes, read: Any) -> None:
    """Raise `UserError` where what was read of a line of JSON is no text that UTF-8 can hold."""
    if not any(mark in line for mark in MAY_BE_HALF):
        return
    try:
        json.dumps(read, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise UserError(
            f"{where}: holds half of a character (a lone surrogate, {half})",
            "fix or delete the line",
        ) from None


def _text(part: Part, span: Span) -> str:
    content = read_bytes(part, span)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(part, span, content, error.start) from None
    if "\0" in text:
        raise _not_utf8(part, span, content, content.index(b"\0"))
    return text


def _not_utf8(part: Part, span: Span, content: bytes, place: int) -> UserError:
    """Of bytes that are no UTF-8: what they look like, and what makes UTF-8 of them."""
    at = f"byte 0x{content[place]:02x} at offset {span.start + place}"
    with part.path.open("rb") as file:
        begin = file.read(NUL_SAMPLE_BYTES)
    encoding = _utf16(begin)
    if encoding:
        return UserError(
            f"{part.path} is not UTF-8 but {encoding}: {at}",
            f"convert it: iconv -f {encoding} -t UTF-8 {part.path.name} > NEW.txt",
        )
    if b"\0" in begin:
        return UserError(f"{part.path} is no text: {at}", "give files of text, not of a program")
    return UserError(
        f"{part.path} is not UTF-8: {at}",
        f"find its encoding, as `file -i {part.path.name}` guesses it, then: "
        f"iconv -f ENCODING -t UTF-8 {part.path.name} > NEW.txt",
    )


def _utf16(begin: bytes) -> str:
    """The kind of UTF-16 that a file begins like, by its mark or by ASCII's empty halves."""
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    low, high = begin[0::2], begin[1::2]
    if high and high.count(0) > len(high) * 3 / 4 and low.count(0) < len(low) / 8:
        return "UTF-16LE"
    return "UTF-16BE" if low.count(0) > len(low) * 3 / 4 and high.count(0) < len(high) / 8 else ""


def _jsonl_row(part: Part, number: int, line: bytes) -> tuple[Any, ...]:
    where = f"{part.path}:{number}"
    if not line.strip():
        return ("", *(None for _ in part.fields[1:]))
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{where}: not JSON: {error}", "fix or delete the line: each is one JSON object"
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object", 'each line is one object: {"text": "…"}')
    for field in part.fields:
        is_text = field == part.fields[0]
        if field not in row or (is_text and not isinstance(row[field], str)):
            raise UserError(
                f"{where}: no {'text' if is_text else 'value'} in the field {field!r}; "
                f"its fields are: {', '.join(row) or 'none'}",
                "set data.text_field (or data.classes) to the fields that are there",
            )
    values = tuple(row[field] for field in part.fields)
    refuse_half_characters(where, line, values)
    return values


def _csv_reader(lines: Iterator[str], format: str) -> Any:
    csv.field_size_limit(sys.maxsize)  # documents are longer than the module expects of a field
    kind, _, plain = format.partition("-")
    more: Any = {"quoting": csv.QUOTE_NONE} if plain else {}
    return csv.reader(lines, delimiter=DELIMITERS[kind], strict=True, **more)


def _csv_columns(path: Path, format: str) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        columns: list[str] = next(filter(None, _csv_reader(file, format)), [])
    return columns


_kept_csv_columns = lru_cache(maxsize=64)(_csv_columns)
