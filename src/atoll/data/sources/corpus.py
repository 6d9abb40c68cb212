"""The text that a run names: files and data sets as the parts of a corpus.

A corpus has a fingerprint, so that tokens are made again when the text changes.
"""

import hashlib
import json
import os
import platform
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from atoll.data.sources import columns, hub, rows
from atoll.data.sources.parts import Part
from atoll.errors import UserError
from atoll.settings import Data
from atoll.settings.named_files import SUFFIXES, named_files, refuse_no_text

# Tests, tables (of characters, entities, help topics) and packages that distributions leave out.
LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib",
    "encodings", "lib2to3", "turtledemo", "pydoc_data", "msilib",
    "entities.py", "stringprep.py", "opcode.py", "_opcode_metadata.py",
}  # fmt: skip
WHOLE = (0.0, 1.0)
SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 16 << 10


@dataclass(frozen=True)
class Corpus:
    """Text to read: its parts in order, and a fingerprint that changes when the text does."""

    parts: tuple[Part, ...]
    fingerprint: str
    max_documents: int | None = None
    older_fingerprint: str | None = None  # as versions before wrote it, where it was another


def train_corpus(data: Data) -> Corpus:
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
    share = (0.0, 1.0 - (data.validation.tail or 0.0))
    return _files(data, data.files, "data.files", data.max_documents, share)


def validation_corpus(data: Data) -> Corpus | None:
    """The held-out text where it has files or a split of its own, else nothing."""
    held_out = data.validation
    if held_out.tail is not None:
        share = (1.0 - held_out.tail, 1.0)
        return _files(data, data.files, "data.files", held_out.max_documents, share)
    if held_out.files:
        return _files(data, held_out.files, "data.validation.files", held_out.max_documents)
    if held_out.split is None:
        return None
    if data.source != "hub":
        raise UserError(
            f"data.validation.split = {held_out.split!r}, but data.source is {data.source}",
            "only the hub has splits: use data.validation.fraction or data.validation.files",
        )
    return _hub(data, held_out.split, "data.validation.split", held_out.max_documents)


def refuse_overlap(train: Corpus, validation: Corpus) -> None:
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
    of_hub = [part for part in train.parts if part.rows is not None]
    for held_out, part in ((held_out, part) for held_out in validation.parts for part in of_hub):
        if held_out.path == part.path and _share_rows(held_out, part):
            raise UserError(
                f"rows of data.validation.split={held_out.split} are trained on too, as "
                f"data.hub_split={part.split} of {part.path}",
                "give splits apart, as 'train[:1%]' and 'train[1%:]', or use "
                "data.validation.fraction",
            )


def _share_rows(part: Part, other: Part) -> bool:
    return any(
        name == others and first < last_of_other and first_of_other < last
        for name, first, last in _slices(part)
        for others, first_of_other, last_of_other in _slices(other)
    )


def _slices(part: Part) -> list[tuple[str, int, int]]:
    """The rows that a split of the hub is made of: a whole one, a slice, or a sum of them."""
    import datasets

    rows_of = {name: split.num_examples for name, split in (part.rows.info.splits or {}).items()}
    try:
        found = datasets.ReadInstruction.from_spec(part.split).to_absolute(rows_of)
    except ValueError:  # a folder that was saved knows its splits by name alone
        return [(part.split, 0, sys.maxsize)]
    return [(each.splitname, each.from_, each.to) for each in found]


def _stdlib(patterns: list[str], count: int | None) -> Corpus:
    """All of it, or the modules that match a pattern: email/*, json*."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not LEFT_OUT & set(path.relative_to(root).parts) and "config-" not in path.parts[-2]
    )
    parts = tuple(
        Part(name, root / name, "source")
        for name in modules
        if not name.startswith("_sysconfigdata")
        and any(fnmatch(name, pattern) for pattern in patterns or ["*"])
    )
    if not parts:
        raise UserError(
            f"no Python sources under {root} match {patterns or 'anything'}, of {len(modules)}",
            "use text of your own: data=text_files data.files=[FILE]",
        )
    return Corpus(parts, _fingerprint(parts, f"python {platform.python_version()}"), count)


def _files(
    data: Data,
    entries: list[str],
    setting: str,
    count: int | None,
    share: tuple[float, float] = WHOLE,
) -> Corpus:
    by_path: dict[Path, Part] = {}
    fields = _fields(data)
    for entry in entries:
        for name, path in named_files(entry, setting):
            part = Part(name, path, _format(path, data, setting), fields, share=share)
            by_path.setdefault(path.resolve(), part)
    parts = tuple(by_path.values())
    refuse_no_text([part.path for part in parts], setting)
    if data.holds_conversations:
        parts = tuple(rows.with_layout(part, data) for part in parts)
    about = [data.document, *fields, *(map(str, share) if share != WHOLE else ())]
    return Corpus(parts, _fingerprint(parts, " ".join(about)), count)


def _fields(data: Data) -> tuple[str, ...]:
    """The column of the text; of rows with labels, perhaps a second text's, and the label's."""
    if data.classes is None:
        return (data.text_field,)
    return (*data.classes.text_fields, data.classes.label_field)


def _format(path: Path, data: Data, setting: str) -> str:
    if data.classes is not None and path.suffix == ".txt":
        raise UserError(
            f"{setting}: {path} has no columns, and data.classes names some",
            "give csv, tsv, jsonl, parquet or arrow files",
        )
    if data.validation.tail is not None and path.suffix != ".txt":
        raise UserError(
            f"{setting}: data.validation.tail cuts text files, and {path} is another kind",
            "use data.validation.fraction",
        )
    if path.suffix == ".txt":
        return f"txt-{data.document}"
    if path.suffix in SUFFIXES:
        plain = path.suffix in (".csv", ".tsv") and not data.quotes
        return f"{path.suffix[1:]}-plain" if plain else path.suffix[1:]
    raise UserError(
        f"{setting}: unknown kind of file: {path}",
        f"give files that end in {', '.join(SUFFIXES)}",
    )


def _hub(data: Data, split: str, setting: str, count: int | None) -> Corpus:
    if data.hub is None:
        raise UserError(
            "data.source is hub, but data.hub is empty",
            "name a data set, or a folder saved with save_to_disk: data.hub=NAME",
        )
    loaded = hub.load(data, split, setting)
    tables = loaded.with_format("arrow")  # slices are tables
    part = Part(data.hub, Path(data.hub), "hub", _fields(data), split=split, rows=tables)
    if data.holds_conversations:
        part = rows.with_layout(part, data)
    columns.refuse_columns(data.hub, loaded.features.arrow_schema, part.fields, part.layout)
    older = hub.fingerprint(loaded, part.fields[:1])
    return Corpus((part,), hub.fingerprint(loaded, part.fields), count, older)


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
