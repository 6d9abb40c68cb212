"""Documents from the standard library, from files or from a hub data set.

An input is a list of parts (files, or one hub data set). `blocks` cuts it into stretches of
documents that depend on the input alone, so that any number of workers makes the same shards;
`texts` reads one block, wherever it lies, without reading what stands before it.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.data import formats, hub
from atoll.data.formats import Part, Span
from atoll.errors import UserError
from atoll.settings import Data

# Enough work to hide the message to a worker, small enough to keep many workers busy to the end.
BLOCK_DOCUMENTS = 2048
BLOCK_BYTES = 512 << 10
SUFFIXES = (".txt", ".jsonl", ".parquet")
# Tests, tables of character codes and packages that distributions leave out.
LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib",
    "encodings", "lib2to3", "turtledemo",
}  # fmt: skip
SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 16 << 10


@dataclass(frozen=True)
class Input:
    """Text to read: its parts in order, and a fingerprint that changes when the text does."""

    parts: tuple[Part, ...]
    fingerprint: str
    max_documents: int | None = None


class Block(NamedTuple):
    """Consecutive documents of one shard, and where they lie."""

    shard: int
    first_document: int
    documents: int
    spans: tuple[Span, ...]


def train_input(data: Data) -> Input:
    """The text that `data.source` names.

    Raises `UserError` where files are missing, unknown or empty, or the hub cannot be reached.
    """
    if data.source == "python_stdlib":
        return _stdlib(data.files, data.max_documents)
    if data.source == "hub":
        return _hub(data, data.hub_split, "data.hub_split", data.max_documents)
    if not data.files:
        raise UserError(
            "data.source is files, but data.files is empty",
            "name files, folders or globs: data.files=[corpus/*.jsonl]",
        )
    tail = data.validation.tail
    share = (0.0, 1.0) if tail is None else (0.0, 1.0 - tail)
    return _files(data, data.files, "data.files", share, data.max_documents)


def validation_input(data: Data) -> Input | None:
    """The held-out text where it has files or a split of its own, else nothing."""
    count = data.validation.max_documents
    if data.validation.tail is not None:
        return _files(data, data.files, "data.files", (1.0 - data.validation.tail, 1.0), count)
    if data.validation.files:
        return _files(data, data.validation.files, "data.validation.files", count=count)
    if data.validation.split is None:
        return None
    if data.source != "hub":
        raise UserError(
            f"data.validation.split = {data.validation.split!r}, but data.source is {data.source}",
            "only the hub has splits: use data.validation.fraction or data.validation.files",
        )
    return _hub(data, data.validation.split, "data.validation.split", count)


def refuse_overlap(train: Input, validation: Input) -> None:
    """Raise `UserError` where held-out text would also be trained on."""
    trained_until = {(part.path.resolve(), part.split): part.share[1] for part in train.parts}
    both = [
        part
        for part in validation.parts
        if part.share[0] < trained_until.get((part.path.resolve(), part.split), 0.0)
    ]
    if both:
        raise UserError(
            f"{len(both)} of {len(validation.parts)} parts of the validation text are trained on "
            f"too, the first is {both[0].path}",
            "take them out of data.files, or use data.validation.fraction",
        )


def blocks(text: Input, documents_per_shard: int) -> Iterator[Block]:
    """Cut an input into blocks; no block crosses the border of a shard."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        ends = _ahead(pool, text.parts)
        yield from cut(ends, documents_per_shard, text.max_documents or 1 << 62)


def cut(
    ends_of_parts: Iterable[npt.NDArray[np.int64]], documents_per_shard: int, max_documents: int
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


def texts(text: Input, block: Block) -> list[str]:
    """The documents of a block; one that is blank or unreadable by choice is an empty string."""
    found: list[str] = []
    for span in block.spans:
        part = text.parts[span.part]
        read = formats.FORMATS[part.format].read(part, span)
        if len(read) != span.documents:
            raise UserError(
                f"{part.path} changed while it was read: {len(read)} documents where "
                f"{span.documents} were counted",
                "wait until the file is complete, then run `atoll tokenize` again",
            )
        found += read
    return [document if not document.isspace() else "" for document in found]


def others(text: Input, block: Block) -> list[tuple[Any, ...]]:
    """The other columns of a block's rows, in the order of `Part.others`."""
    found: list[tuple[Any, ...]] = []
    for span in block.spans:
        part = text.parts[span.part]
        read = formats.FORMATS[part.format].read_others
        assert read is not None, "settings let labels through for text without columns"
        found += read(part, span)
    return found


def _ahead(pool: ThreadPoolExecutor, parts: tuple[Part, ...]) -> Iterator[npt.NDArray[np.int64]]:
    """Scan parts in order, a few ahead of the one that is asked for."""
    waiting = iter(parts)
    running = [pool.submit(_ends, part) for part in islice(waiting, 16)]
    while running:
        yield running.pop(0).result()
        running += [pool.submit(_ends, part) for part in islice(waiting, 1)]


def _ends(part: Part) -> npt.NDArray[np.int64]:
    return formats.FORMATS[part.format].ends(part)


def _stdlib(patterns: list[str], count: int | None) -> Input:
    """All of it, or the modules that match a pattern: email/*, json*."""
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not LEFT_OUT & set(path.relative_to(root).parts) and "config-" not in path.parts[-2]
    )
    chosen = [
        name
        for name in found
        if not name.startswith("_sysconfigdata")
        and (not patterns or any(fnmatch(name, pattern) for pattern in patterns))
    ]
    parts = tuple(Part(name, root / name, "source") for name in chosen)
    if not parts:
        raise UserError(
            f"no Python sources under {root} that match {patterns or 'anything'}, of {len(found)}",
            "use text of your own: data=text_files data.files=[FILE]",
        )
    return Input(parts, _fingerprint(parts, f"python {platform.python_version()}"), count)


def _files(
    data: Data,
    entries: list[str],
    setting: str,
    share: tuple[float, float] = (0.0, 1.0),
    count: int | None = None,
) -> Input:
    found: dict[Path, Part] = {}
    field, others = _columns(data)
    for entry in entries:
        for name, path in _expand(entry, setting):
            format = _format(path, data, setting)
            part = Part(name, path, format, field=field, others=others, share=share)
            found.setdefault(path.resolve(), part)
    parts = tuple(found.values())
    if not any(part.path.stat().st_size for part in parts):
        raise UserError(
            f"{setting} holds no text: {len(parts)} files, 0 bytes", "give files that are not empty"
        )
    about = [data.document, field, *others, *(map(str, share) if share != (0.0, 1.0) else ())]
    return Input(parts, _fingerprint(parts, " ".join(about)), count)


def _columns(data: Data) -> tuple[str, tuple[str, ...]]:
    """The column of the text, and the others: of rows with labels, a second text and the label."""
    if data.classes is None:
        return data.text_field, ()
    first, *second = data.classes.text_fields
    return first, (*second, data.classes.label_field)


def _expand(entry: str, setting: str) -> list[tuple[str, Path]]:
    """The files behind one entry, each with a name that does not depend on the machine."""
    path = Path(entry).expanduser()
    if path.is_dir():
        inside = sorted(
            file.relative_to(path).as_posix()
            for file in path.rglob("*")
            if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith(".")
        )
        if not inside:
            raise UserError(
                f"{setting}: the folder {entry} holds no file that ends in {', '.join(SUFFIXES)}",
                "give a folder that does, or name the files",
            )
        return [(name, path / name) for name in inside]
    if path.is_file():
        return [(path.name, path)]
    root = Path(path.anchor)
    pattern = str(path.relative_to(root))
    matches = sorted(match for match in root.glob(pattern) if match.is_file())
    if not matches:
        kind = "no file matches" if set("*?[") & set(entry) else "no such file or folder:"
        raise UserError(
            f"{setting}: {kind} {entry} (from {Path.cwd()})",
            "check the spelling; relative paths start where the command was typed",
        )
    return [(match.name, match) for match in matches]


def _format(path: Path, data: Data, setting: str) -> str:
    if data.classes is not None and path.suffix == ".txt":
        raise UserError(
            f"{setting}: {path} has no columns, and data.classes names some",
            "give jsonl or parquet files",
        )
    if data.validation.tail is not None and path.suffix != ".txt":
        raise UserError(
            f"{setting}: data.validation.tail cuts text files, and {path} is another kind",
            "use data.validation.fraction",
        )
    if path.suffix == ".txt":
        return f"txt-{data.document}"
    if path.suffix in SUFFIXES:
        return path.suffix[1:]
    raise UserError(
        f"{setting}: unknown kind of file: {path}",
        f"give files that end in {', '.join(SUFFIXES)}",
    )


def _hub(data: Data, split: str, setting: str, count: int | None) -> Input:
    if data.hub is None:
        raise UserError(
            "data.source is hub, but data.hub is empty",
            "name a data set, or a folder saved with save_to_disk: data.hub=NAME",
        )
    rows = hub.load(data.hub, data.hub_config, split, setting)
    field, others = _columns(data)
    hub.refuse_column(rows, data.hub, field, others)
    part = Part(data.hub, Path(data.hub), "hub", field=field, split=split, rows=rows, others=others)
    return Input((part,), hub.fingerprint(rows, field), count)


def _fingerprint(parts: tuple[Part, ...], about: str) -> str:
    """A digest of names, sizes and evenly spread samples of content.

    No time stamp enters: copying or touching a file does not make it another one.
    """
    with ThreadPoolExecutor(max_workers=16) as pool:
        listing: list[Any] = list(pool.map(_sampled, parts))
    return hashlib.sha256(json.dumps([about, listing]).encode()).hexdigest()


def _sampled(part: Part) -> list[str | int]:
    hasher = hashlib.sha256()
    try:
        with part.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            step = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (SAMPLES_PER_FILE - 1))
            for offset in range(0, size, step):
                file.seek(offset)
                hasher.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise UserError(
            f"cannot read {part.path}: {error.strerror}", "check the file and its permissions"
        ) from None
    return [part.name, size, hasher.hexdigest()]
