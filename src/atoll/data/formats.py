"""How each kind of file holds documents: where they end, and how a span of them is read.

`ends` gives the cumulative size in bytes after each document: exact for text, estimated for
columns, where only the order of magnitude matters. `read` gives the texts of a span.
"""

import json
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.errors import UserError

Ends = npt.NDArray[np.int64]
# Paragraphs stand between blank lines; the indentation of the next line is its own.
BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
BLANK_LINES_BYTES = re.compile(BLANK_LINES.pattern.encode())
SCAN_BYTES = 16 << 20


@dataclass(frozen=True)
class Part:
    """One file of an input, or one data set of the hub with its `rows`."""

    name: str
    path: Path
    format: str
    field: str = ""
    split: str = ""
    rows: Any = None
    others: tuple[str, ...] = ()  # more columns of the same rows
    share: tuple[float, float] = (0.0, 1.0)  # of a whole file's characters


class Span(NamedTuple):
    """Consecutive documents of one part, by number and by the bytes they lie in."""

    part: int
    first: int
    documents: int
    start: int
    stop: int


class Format(NamedTuple):
    """How documents of one kind of file are found and read."""

    ends: Callable[[Part], Ends]
    read: Callable[[Part, Span], list[str]]
    # the other columns of the same rows, where there are any
    read_others: Callable[[Part, Span], list[tuple[Any, ...]]] | None = None


def file_ends(part: Part) -> Ends:
    """A whole file is one document."""
    return np.array([part.path.stat().st_size], dtype=np.int64)


def line_ends(part: Part) -> Ends:
    """A line is one document."""
    found, offset, last = [], 0, 10
    with part.path.open("rb") as file:
        while piece := file.read(SCAN_BYTES):
            found.append(np.flatnonzero(np.frombuffer(piece, dtype=np.uint8) == 10) + offset + 1)
            offset, last = offset + len(piece), piece[-1]
    if last != 10:
        found.append(np.array([offset]))
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, dtype=np.int64)


def paragraph_ends(part: Part) -> Ends:
    """A paragraph, up to and with the blank lines after it, is one document."""
    size = part.path.stat().st_size
    if size == 0:
        return np.zeros(0, dtype=np.int64)
    with part.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
        ends = [match.end() for match in BLANK_LINES_BYTES.finditer(text)]
    if not ends or ends[-1] != size:
        ends.append(size)
    return np.array(ends, dtype=np.int64)


def parquet_ends(part: Part) -> Ends:
    """A row is one document; its size is the mean of its row group."""
    found, offset = [], 0
    with _parquet(part) as file:
        column = _parquet_column(part, file)
        for group in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(group)
            size = about.column(column).total_uncompressed_size
            steps = np.arange(1, about.num_rows + 1, dtype=np.float64) / max(1, about.num_rows)
            found.append((offset + steps * size).astype(np.int64))
            offset += size
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def hub_ends(part: Part) -> Ends:
    """A row is one document; its size is the mean of the data set."""
    rows = len(part.rows)
    mean = part.rows.data.nbytes / max(1, rows)
    ends: Ends = (np.arange(1, rows + 1, dtype=np.float64) * mean).astype(np.int64)
    return ends


def read_file(part: Part, span: Span) -> list[str]:
    text = _decoded(part, span, _bytes(part, span))
    begin, end = (int(len(text) * share) for share in part.share)
    return [text[begin:end]]


def read_source(part: Part, span: Span) -> list[str]:
    """A source file; one in another encoding than UTF-8 is left out."""
    try:
        return [_bytes(part, span).decode()]
    except UnicodeDecodeError:
        return [""]


def read_lines(part: Part, span: Span) -> list[str]:
    text = _decoded(part, span, _bytes(part, span))
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_paragraphs(part: Part, span: Span) -> list[str]:
    found = BLANK_LINES.split(_decoded(part, span, _bytes(part, span)))
    if len(found) == span.documents + 1 and not found[-1]:
        found.pop()
    return [paragraph.rstrip("\r\n") for paragraph in found]


def read_jsonl(part: Part, span: Span) -> list[str]:
    """The text field of each line; a blank line is an empty document."""
    return [str(row[0]) if row else "" for row in _jsonl_rows(part, span, (part.field,), str)]


def read_jsonl_others(part: Part, span: Span) -> list[tuple[Any, ...]]:
    return _jsonl_rows(part, span, part.others, object)


def read_parquet(part: Part, span: Span) -> list[str]:
    return [text or "" for text in _parquet_values(part, span, part.field)]


def read_parquet_others(part: Part, span: Span) -> list[tuple[Any, ...]]:
    return list(zip(*(_parquet_values(part, span, name) for name in part.others), strict=True))


def read_hub(part: Part, span: Span) -> list[str]:
    rows = part.rows[span.first : span.first + span.documents][part.field]
    return [text or "" for text in rows]


def read_hub_others(part: Part, span: Span) -> list[tuple[Any, ...]]:
    rows = part.rows[span.first : span.first + span.documents]
    return list(zip(*(rows[name] for name in part.others), strict=True))


FORMATS = {
    "source": Format(file_ends, read_source),
    "txt-file": Format(file_ends, read_file),
    "txt-paragraph": Format(paragraph_ends, read_paragraphs),
    "txt-line": Format(line_ends, read_lines),
    "jsonl": Format(line_ends, read_jsonl, read_jsonl_others),
    "parquet": Format(parquet_ends, read_parquet, read_parquet_others),
    "hub": Format(hub_ends, read_hub, read_hub_others),
}


def _bytes(part: Part, span: Span) -> bytes:
    with part.path.open("rb") as file:
        file.seek(span.start)
        return file.read(span.stop - span.start)


def _decoded(part: Part, span: Span, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{part.path} is not UTF-8: byte 0x{content[error.start]:02x} "
            f"at offset {span.start + error.start}",
            f"convert it: iconv -f LATIN1 -t UTF-8 {part.path.name}",
        ) from None


def _parquet_values(part: Part, span: Span, field: str) -> list[Any]:
    found: list[Any] = []
    first, stop = span.first, span.first + span.documents
    for group, start, rows in _row_groups(part.path):
        if start < stop and first < start + rows:
            begin, end = max(first - start, 0), min(stop - start, rows)
            found += _column(part.path, group, field)[begin:end].to_pylist()
    return found


def _jsonl_rows(
    part: Part, span: Span, fields: tuple[str, ...], kind: type
) -> list[tuple[Any, ...]]:
    """The fields of each line; nothing for a blank line."""
    lines = _bytes(part, span).removesuffix(b"\n").split(b"\n")
    return [
        _record(part, span.first + number, line, fields, kind) if line.strip() else ()
        for number, line in enumerate(lines, 1)
    ]


def _record(
    part: Part, line_number: int, line: bytes, fields: tuple[str, ...], kind: type
) -> tuple[Any, ...]:
    where = f"{part.path}:{line_number}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{where}: not JSON: {error}", "fix or delete the line: each is one JSON object"
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object", 'each line is one object: {"text": "…"}')
    for field in fields:
        if field not in record or not isinstance(record[field], kind):
            names = ", ".join(record) or "none"
            raise UserError(
                f"{where}: no {'text' if kind is str else 'value'} in the field {field!r}; "
                f"its fields are: {names}",
                "set data.text_field (or data.classes) to the fields that are there",
            )
    return tuple(record[field] for field in fields)


def _parquet(part: Part) -> Any:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(part.path)
    except (ArrowException, OSError) as error:
        raise UserError(
            f"{part.path} cannot be read as parquet: {str(error).splitlines()[0]}",
            "copy it again: the file is cut short or of another kind",
        ) from None


def _parquet_column(part: Part, file: Any) -> int:
    """The number of the text column among the leaves of the schema."""
    import pyarrow

    schema = file.schema_arrow
    if part.field not in schema.names:
        raise UserError(
            f"{part.path} has no column {part.field!r}; its columns are: {', '.join(schema.names)}",
            "set data.text_field to the column that holds the text",
        )
    missing = [name for name in part.others if name not in schema.names]
    if missing:
        raise UserError(
            f"{part.path} has no column {missing[0]!r}; its columns are: {', '.join(schema.names)}",
            "set data.classes.text_fields and .label_field to columns that are there",
        )
    kind = schema.field(part.field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(
            f"{part.path}: the column {part.field!r} holds {kind}, not text",
            "set data.text_field to the column that holds the text",
        )
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    return leaves.index(part.field)


@lru_cache(maxsize=64)
def _row_groups(path: Path) -> list[tuple[int, int, int]]:
    """(number, first row, rows) of each row group."""
    from pyarrow.parquet import ParquetFile

    found, start = [], 0
    with ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            found.append((group, start, rows))
            start += rows
    return found


@lru_cache(maxsize=4)
def _column(path: Path, group: int, field: str) -> Any:
    """One row group's text; kept, since the next block often lies in the same one."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        return file.read_row_group(group, columns=[field]).column(0)
