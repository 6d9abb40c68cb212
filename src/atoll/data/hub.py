"""A data set of the Hugging Face hub, from the network, its cache, or a folder."""

import hashlib
import json
from pathlib import Path
from typing import Any

from atoll.errors import UserError

SAMPLED_ROWS = 64


def load(name: str, config: str | None, split: str, setting: str) -> Any:
    """One split of a data set, memory-mapped.

    Raises `UserError` where it is unknown, has no such split, or cannot be reached.
    """
    import datasets

    datasets.disable_progress_bars()
    saved = Path(name).expanduser()
    try:
        if (saved / "state.json").is_file() or (saved / "dataset_dict.json").is_file():
            return _of_split(datasets.load_from_disk(str(saved)), split, name, setting)
        return datasets.load_dataset(str(saved) if saved.is_dir() else name, config, split=split)
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds, from many layers below it
        lines = str(error).strip().splitlines() or [""]
        raise UserError(
            f"data.hub={name} (config {config}, {setting}={split}) cannot be loaded: "
            f"{type(error).__name__}: {lines[0][:300]}",
            "check the name, config and split; where there is no network, save it elsewhere with "
            "datasets' save_to_disk and set data.hub to that folder",
        ) from error


def _of_split(found: Any, split: str, name: str, setting: str) -> Any:
    import datasets

    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        raise UserError(
            f"{name} has no split {split!r}; its splits are: {', '.join(found)}",
            f"set {setting} to one of them",
        )
    return found[split]


def refuse_column(rows: Any, name: str, field: str, others: tuple[str, ...] = ()) -> None:
    """Raise `UserError` unless `field` is a column of text, and the others are columns."""
    for wanted in (field, *others):
        if wanted not in rows.column_names:
            raise UserError(
                f"{name} has no column {wanted!r}; its columns are: {', '.join(rows.column_names)}",
                "set data.text_field (or data.classes) to the columns that are there",
            )
    kind = str(rows.features[field])
    if "string" not in kind:
        raise UserError(
            f"{name}: the column {field!r} holds {kind}, not text",
            "set data.text_field to the column that holds the text",
        )


def fingerprint(rows: Any, field: str) -> str:
    """A digest of the size and of evenly taken rows; the same on every machine."""
    numbers = range(0, len(rows), max(1, len(rows) // SAMPLED_ROWS))
    sampled = [rows[number][field] for number in numbers]
    text = json.dumps([len(rows), rows.column_names, field, sampled])
    return hashlib.sha256(text.encode()).hexdigest()
