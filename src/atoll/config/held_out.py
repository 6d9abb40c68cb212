"""What is held out of a text that is one document: its end."""

from pathlib import Path
from typing import Any

from atoll.settings import Data, Run, Source, Validation

ONE_TEXT = "a single text is one document: its end is held out"


def with_held_out_tail(run: Run, sources: dict[str, str]) -> Run:
    """The run with the end of its text held out, where no share of documents could be.

    That is so of a single text file that is one document. Says so in `sources`.
    """
    data = run.data
    held_out: dict[str, Any]
    if data.sources:
        held_out = {"sources": list(map(_with_tail, data.sources, data.each))}
    elif (tail := _tail(data)) is not None:
        sources["data.validation.tail"] = sources["data.validation.fraction"] = ONE_TEXT
        held_out = {"validation": tail}
    else:
        return run
    return run.model_copy(update={"data": data.model_copy(update=held_out)})


def _with_tail(source: Source, data: Data) -> Source:
    tail = _tail(data)
    return source if tail is None else source.model_copy(update={"validation": tail})


def _tail(data: Data) -> Validation | None:
    """The same, where the file is here."""
    tail = tail_of(data)
    return tail if tail and Path(data.files[0]).is_file() else None


def tail_of(data: Data) -> Validation | None:
    """What is held out instead of a share of documents; nothing where there are several."""
    is_one_text = (
        data.source == "files"
        and data.document == "file"
        and len(data.files) == 1
        and data.files[0].endswith(".txt")
    )
    fraction = data.validation.fraction
    return Validation(tail=fraction) if fraction and is_one_text else None
