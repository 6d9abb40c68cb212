"""What a corpus is made of, and how a place in it is told."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.errors import UserError

Ends = npt.NDArray[np.int64]
# of each field of a part, the values of a span's rows
Columns = list[list[Any]]


@dataclass(frozen=True)
class Part:
    """One file of a corpus, or one data set of the hub with its `rows`."""

    name: str
    path: Path
    format: str
    fields: tuple[str, ...] = ()  # the column of the text, then the others that are read
    split: str = ""
    rows: Any = None
    share: tuple[float, float] = (0.0, 1.0)  # of a whole file's characters
    layout: str = ""  # of conversations, where rows are those


class Span(NamedTuple):
    """Consecutive documents of one part, by number and by the bytes they lie in."""

    part: int
    first: int
    documents: int
    start: int
    stop: int


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Say in a mistake which source it is of."""
    try:
        yield
    except UserError as error:
        raise UserError(f"source {source}: {error.found}", error.hint) from error


def refuse_missing_columns(name: object, columns: Iterable[str], fields: Iterable[str]) -> None:
    """Raise `UserError` naming the columns that are there, unless all fields are among them."""
    known = list(columns)
    for field in fields:
        if field not in known:
            raise UserError(
                f"{name} has no column {field!r}; its columns are: {', '.join(known)}",
                "set data.text_field (or data.classes) to the columns that are there",
            )
