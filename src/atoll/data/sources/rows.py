"""Rows that hold conversations, each with its place in its file, for whoever has to mend it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from atoll.data.sources import columns, text_files
from atoll.data.sources.conversations import OPTIONAL, layout_of, pair_layout_of
from atoll.data.sources.parts import Columns, Part, Span
from atoll.errors import UserError
from atoll.settings import Data

FORMATS = ("jsonl", "parquet", "arrow", "hub")
LAST_LOOKED_AT = 64  # rows, for one that is not blank


class Row(NamedTuple):
    """The fields of one row, and where it stands; no fields where it is blank."""

    place: str
    fields: dict[str, Any]


def read_jsonl(part: Part, span: Span) -> Columns:
    """Each line as a row; a blank line is an empty one."""
    return [[_row(part, place, line) for place, line in _lines(part, span)]]


def columnar(read: Callable[[Part, Span], Columns]) -> Callable[[Part, Span], Columns]:
    """Rows of a format that is read by columns.

    A struct of such a file has every key that any row has; those that are null are left out.
    """

    def read_rows(part: Part, span: Span) -> Columns:
        values = zip(*read(part, span), strict=True)
        numbered = enumerate(values, span.first + 1)
        return [
            [
                Row(
                    f"{part.path}: record {number}",
                    _known(dict(zip(part.fields, row, strict=True))),
                )
                for number, row in numbered
            ]
        ]

    return read_rows


def with_layout(part: Part, data: Data) -> Part:
    """The part as conversations, after a look at its columns or its first row.

    Raises `UserError` where there is none that holds conversations.
    """
    if part.format not in FORMATS:
        raise UserError(
            f"{part.path} is {part.format}, and data.format={data.format} reads rows with messages",
            f"give {', '.join(FORMATS[:-1])} files, or a data set of the hub",
        )
    if part.format == "jsonl":
        row = _first_row(part)
        return replace(part, format="chat-jsonl", **_described(part, row.place, row.fields, data))
    names = part.rows.column_names if part.format == "hub" else columns.column_names(part)
    described = _described(part, str(part.path), dict.fromkeys(names), data)
    return replace(part, format=f"chat-{part.format}", **described)


def _described(part: Part, place: str, fields: dict[str, Any], data: Data) -> dict[str, Any]:
    find = pair_layout_of if data.format == "preference" else layout_of
    layout = find(place, fields, data.text_field)
    optional = [name for name in OPTIONAL if name in fields and name not in layout.fields]
    return {"layout": layout.name, "fields": (*layout.fields, *optional)}


def _first_row(part: Part) -> Row:
    with part.path.open("rb") as file:
        for number, line in enumerate(islice(file, LAST_LOOKED_AT), 1):
            if line.strip():
                return _row(part, f"{part.path}:{number}", line)
    raise UserError(
        f"{part.path} holds no conversation in its first {LAST_LOOKED_AT} lines",
        'each line is one object: {"messages": [{"role": "user", "content": "…"}, …]}',
    )


def _lines(part: Part, span: Span) -> Iterable[tuple[str, bytes]]:
    lines = text_files.read_bytes(part, span).removesuffix(b"\n").split(b"\n")
    return ((f"{part.path}:{number}", line) for number, line in enumerate(lines, span.first + 1))


def _row(part: Part, place: str, line: bytes) -> Row:
    if not line.strip():
        return Row(place, {})
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{place}: not JSON: {error}", "fix or delete the line: each is one JSON object"
        ) from None
    if not isinstance(fields, dict):
        raise UserError(f"{place}: not a JSON object", 'each line is one: {"messages": [ … ]}')
    text_files.refuse_half_characters(place, line, fields)
    return Row(place, fields)


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _known(inner) for name, inner in value.items() if inner is not None}
    return [_known(inner) for inner in value] if isinstance(value, list) else value
