"""A data set of the Hugging Face hub, from the network, its cache, or a folder."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from atoll.data.sources.hub_reach import NO_ANSWER, endpoint, use_cache_if_unreachable
from atoll.errors import UserError, first_line
from atoll.settings import Data

SAMPLED_ROWS = 64
CARDS = ("README.md", ".huggingface.yaml")  # where a data set may say which files are its own
ARCHIVES = ("zip", "tar", "gzip", "bz2", "lz4", "xz", "zstd")  # ARCHIVE://name::PLACE
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
# the end of a file's name -> what `datasets` reads it with
BUILDERS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
ELSEWHERE = (
    "check the name, config and split; where there is no network, save it elsewhere with "
    "datasets' save_to_disk and set data.hub to that folder"
)
SCRIPT = (
    "name its files, as data.hub_files.train=['FOLDER/*.json.gz'] data.hub_config=null, or a "
    "converted branch where it has one, data.hub_revision=refs/convert/parquet"
)


def load(data: Data, split: str, setting: str) -> Any:
    """One split of a data set, memory-mapped, in the order that its shuffling gives.

    Raises `UserError` where it is unknown, has no such split, or cannot be reached.
    """
    rows = _in_order(data, split, setting)
    if data.hub_shuffle_seed is None:
        return rows
    return rows.shuffle(seed=data.hub_shuffle_seed, keep_in_memory=True)


def fingerprint(rows: Any, fields: Sequence[str]) -> str:
    """A digest of the size and of evenly taken rows' columns; the same on every machine."""
    numbers = range(0, len(rows), max(1, len(rows) // SAMPLED_ROWS))
    first, *others = fields
    read = [rows[number] for number in numbers]
    sampled = [row[first] for row in read]
    also = [[[row[field] for field in others] for row in read]] if others else []
    # a time is neither text nor number
    text = json.dumps([len(rows), rows.column_names, first, sampled, *also], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _in_order(data: Data, split: str, setting: str) -> Any:
    name, folder = str(data.hub), Path(str(data.hub)).expanduser()
    is_away = not folder.exists() and use_cache_if_unreachable()
    import datasets

    datasets.disable_progress_bars()
    words, more = _request(data, name, folder, split)
    try:
        if not any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            declared = more.get("data_files") or _declared_files(data, name, folder)
            _refuse_addresses(name, declared)  # before it is asked whether there is such a file
            builder = datasets.load_dataset_builder(*words, **more)
            _refuse_files_elsewhere(name, folder, builder.config.data_files or {})
            builder.download_and_prepare()
            return builder.as_dataset(split=split)
        _refuse_files_elsewhere(name, folder, _saved_files(folder))
        saved = datasets.load_from_disk(str(folder))
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds, from many layers below it
        why = f"{type(error).__name__}: {first_line(error)[:300]}"
        raise UserError(
            f"data.hub={name} (config {data.hub_config}, {setting}={split}) cannot be loaded: "
            f"{NO_ANSWER if is_away else why}",
            SCRIPT if "scripts are no longer supported" in first_line(error) else ELSEWHERE,
        ) from error
    if not isinstance(saved, datasets.DatasetDict):
        if setting == "data.validation.split":
            raise UserError(
                f"{name} was saved as one data set: it has no split {split!r} to hold out",
                "use data.validation.fraction, or save both splits as a DatasetDict",
            )
        return saved
    if split not in saved:
        raise UserError(
            f"{name} has no split {split!r}; its splits are: {', '.join(saved)}",
            f"set {setting} to one of them",
        )
    return saved[split]


def _refuse_files_elsewhere(
    name: str, folder: Path, files_of: Mapping[str, Iterable[object]]
) -> None:
    """Raise `UserError` where a data set is made of files that are neither its own nor the hub's.

    Its README may name any path, or an address that this machine alone reaches, and `text` or
    `json` alone is all of the working folder.
    """
    _refuse_addresses(name, files_of)
    own = tuple(os.path.join(way(folder), "") for way in (os.path.abspath, os.path.realpath))
    for file in (str(file) for files in files_of.values() for file in files):
        place = file.rpartition("::")[2]  # zip://name::PLACE
        is_own = folder.is_dir() and os.path.abspath(place).startswith(own)
        if not ("://" in place or is_own):
            raise _no_own_file(name, place)


def _refuse_addresses(name: str, files_of: Mapping[str, Iterable[object]]) -> None:
    """Raise `UserError` for an address that is not the hub's, also of an archive that holds it."""
    hub = ("hf://", f"{endpoint()}/")
    for file in (str(file) for files in files_of.values() for file in files):
        *archives, place = file.split("::")
        if any(part.partition("://")[0] not in ARCHIVES for part in archives):
            raise _no_own_file(name, file)
        if "://" in place and not place.startswith(hub):
            raise _no_own_file(name, place)


def _no_own_file(name: str, place: str) -> UserError:
    return UserError(
        f"data.hub={name} reads {place}, which is no file of that data set",
        "name a data set as OWNER/NAME, or the folder that its files are in",
    )


def _declared_files(data: Data, name: str, folder: Path) -> dict[str, list[str]]:
    """What a data set calls its files, in the configurations that are read, by where it says so."""
    import yaml
    from huggingface_hub import metadata_load

    declared = dict[str, list[str]]()
    for file in CARDS:
        path = folder / file if folder.is_dir() else _fetched(name, file, data.hub_revision)
        if path is not None and path.is_file():
            is_card = path.suffix == ".md"
            content = metadata_load(path) if is_card else yaml.safe_load(path.read_text())
            configs = content.get("configs") if isinstance(content, dict) else None
            declared[file] = list(_files_of(configs, data.hub_config))
    return declared


def _files_of(configs: Any, asked: str | None) -> Iterator[str]:
    """By the first one `datasets` learns how files are read, whichever is loaded.

    Of two with one name it takes the last, in the place of the first.
    """
    listed = configs if isinstance(configs, list) else []
    known = {str(one.get("config_name")): one for one in listed if isinstance(one, dict)}
    for name, config in known.items():
        if config is next(iter(known.values())) or asked in (None, name):
            yield from _texts([config.get("data_files"), config.get("data_dir")])


def _fetched(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a repository; None where there is none, or it cannot be had."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=revision))
    except Exception:  # `datasets` asks for it too, and says what is wrong
        return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _texts(part)


def _saved_files(folder: Path) -> dict[str, list[str]]:
    """The files that `save_to_disk` noted, of each split; they may name others."""
    states = {path.parent: json.loads(path.read_text()) for path in folder.rglob("state.json")}
    return {
        str(part): [os.path.join(part, file["filename"]) for file in state["_data_files"]]
        for part, state in states.items()
    }


def _request(
    data: Data, name: str, folder: Path, split: str
) -> tuple[tuple[str | None, ...], dict[str, Any]]:
    """What `load_dataset` is asked for: a repository as it describes itself, or files of it."""
    if not data.hub_files:
        more = {} if data.hub_revision is None else {"revision": data.hub_revision}
        return (str(folder) if folder.is_dir() else name, data.hub_config), more
    if split not in data.hub_files:
        raise UserError(
            f"data.hub_files names no files of the split {split!r}; "
            f"its splits are: {', '.join(data.hub_files)}",
            f"data.hub_files.{split}=[PATTERN]",
        )
    revision = "" if data.hub_revision is None else f"@{quote(data.hub_revision, safe='')}"
    root = str(folder) if folder.is_dir() else f"hf://datasets/{name}{revision}"
    files = data.hub_files[split]
    return (_builder(files[0]),), {"data_files": {split: [f"{root}/{file}" for file in files]}}


def _builder(file: str) -> str:
    kind = next((end for end in PurePosixPath(file).suffixes[::-1] if end not in COMPRESSED), "")
    if kind not in BUILDERS:
        raise UserError(
            f"data.hub_files: unknown kind of file: {file}",
            f"name files that end in {', '.join(BUILDERS)}, or these and {', '.join(COMPRESSED)}",
        )
    return BUILDERS[kind]
