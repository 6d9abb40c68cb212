"""Documents of files and data sets in columns, where a row is one document.

`..._ends` estimates the byte at which each document ends: only the order of magnitude matters.
`read_...` gives the columns of a span.
"""

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from atoll.data.sources.parts import Columns, Ends, Part, Span, refuse_missing_columns
from atoll.errors import UserError, first_line


def parquet_ends(part: Part) -> Ends:
    """The size of a row is the mean of its row group."""
    ends, size = [np.zeros(0, dtype=np.int64)], 0
    with _opened(part, _parquet) as file:
        refuse_columns(part.path, file.schema_arrow, part.fields, part.layout)
        leaves = [file.schema.column(number).path for number in range(len(file.schema))]
        first = part.fields[0]
        read = [n for n, leaf in enumerate(leaves) if leaf == first or leaf.startswith(f"{first}.")]
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            group_bytes = sum(group.column(n).total_uncompressed_size for n in read)
            steps = np.arange(1, group.num_rows + 1, dtype=np.float64) / max(1, group.num_rows)
            ends.append((size + steps * group_bytes).astype(np.int64))
            size += group_bytes
    return np.concatenate(ends)


def arrow_ends(part: Part) -> Ends:
    """The size of a row is the mean of the file."""
    table = _opened(part, _arrow)
    refuse_columns(part.path, table.schema, part.fields, part.layout)
    return _even_ends(table.num_rows, table.nbytes)


def hub_ends(part: Part) -> Ends:
    """The size of a row is the mean of the data set."""
    return _even_ends(len(part.rows), part.rows.data.nbytes)


def read_parquet(part: Part, span: Span) -> Columns:
    ends = _row_group_ends(part.path)
    columns: Columns = [[] for _ in part.fields]
    row, stop = span.first, span.first + span.documents
    while row < min(stop, ends[-1]):
        group = bisect_right(ends, row)
        start = ends[group - 1] if group else 0
        rows = _row_group(part.path, group, part.fields)[row - start : stop - start]
        for column, values in zip(columns, _values(rows, part.fields), strict=True):
            column += values
        row = ends[group]
    return columns


def read_arrow(part: Part, span: Span) -> Columns:
    return _values(_kept_arrow(part.path)[span.first : span.first + span.documents], part.fields)


def read_hub(part: Part, span: Span) -> Columns:
    return _values(part.rows[span.first : span.first + span.documents], part.fields)


def refuse_columns(name: object, schema: Any, fields: tuple[str, ...], layout: str = "") -> None:
    """Raise `UserError` unless all fields are columns, and of rows of text the first is one."""
    from pyarrow import types

    refuse_missing_columns(name, schema.names, fields)
    if layout:
        return
    kind = schema.field(fields[0]).type
    values = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(values) or types.is_large_string(values)):
        raise UserError(
            f"{name}: the column {fields[0]!r} holds {kind}, not text",
            "set data.text_field to the column that holds the text",
        )


def column_names(part: Part) -> list[str]:
    """The columns of a file."""
    if part.format.endswith("parquet"):
        with _opened(part, _parquet) as file:
            return list(file.schema_arrow.names)
    return list(_opened(part, _arrow).schema.names)


def _values(table: Any, fields: tuple[str, ...]) -> Columns:
    """A table's columns as lists; a document that is null is empty."""
    text, *others = (table[field].to_pylist() for field in fields)
    return [[document or "" for document in text], *others]


def _even_ends(rows: int, size: int) -> Ends:
    ends: Ends = (np.arange(1, rows + 1, dtype=np.float64) * (size / max(1, rows))).astype(np.int64)
    return ends


def _opened(part: Part, open_file: Any) -> Any:
    from pyarrow import ArrowException

    try:
        return open_file(part.path)
    except (ArrowException, OSError) as error:
        raise UserError(
            f"{part.path} cannot be read as {part.format}: {first_line(error)}",
            "copy it again: the file is cut short or of another kind",
        ) from None


def _parquet(path: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path)


@lru_cache(maxsize=64)
def _row_group_ends(path: Path) -> list[int]:
    with _parquet(path) as file:
        groups = range(file.num_row_groups)
        rows = np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in groups)])
    numbers: list[int] = rows[1:].tolist()
    return numbers


@lru_cache(maxsize=1)
def _row_group(path: Path, group: int, fields: tuple[str, ...]) -> Any:
    """One row group's columns; kept, since the next block often lies in the same one."""
    with _parquet(path) as file:
        return file.read_row_group(group, columns=list(fields))


def _arrow(path: Path) -> Any:
    """A memory-mapped table, of a file or, as `datasets` writes it, of a stream."""
    import pyarrow

    try:
        return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()


_kept_arrow = lru_cache(maxsize=64)(_arrow)
