"""A data set of the Hugging Face hub, from the network, its cache, or a folder."""

import hashlib
import json
from pathlib import Path
from typing import Any

from atoll.errors import UserError, first_line

SAMPLED_ROWS = 64


def load(name: str, config: str | None, split: str, setting: str) -> Any:
    """One split of a data set, memory-mapped.

    Raises `UserError` where it is unknown, has no such split, or cannot be reached.
    """
    import datasets

    datasets.disable_progress_bars()
    folder = Path(name).expanduser()
    try:
        if not any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            source = str(folder) if folder.is_dir() else name
            return datasets.load_dataset(source, config, split=split)
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many kinds, from many layers below it
        raise UserError(
            f"data.hub={name} (config {config}, {setting}={split}) cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)[:300]}",
            "check the name, config and split; where there is no network, save it elsewhere with "
            "datasets' save_to_disk and set data.hub to that folder",
        ) from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise UserError(
            f"{name} has no split {split!r}; its splits are: {', '.join(saved)}",
            f"set {setting} to one of them",
        )
    return saved[split]


def fingerprint(rows: Any, field: str) -> str:
    """A digest of the size and of evenly taken rows; the same on every machine."""
    numbers = range(0, len(rows), max(1, len(rows) // SAMPLED_ROWS))
    sampled = [rows[number][field] for number in numbers]
    text = json.dumps([len(rows), rows.column_names, field, sampled])
    return hashlib.sha256(text.encode()).hexdigest()
