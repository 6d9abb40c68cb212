"""What the run behind an update was made with, as the statement says that came with it."""

from pathlib import Path
from typing import Any

from atoll.errors import UserError, printable
from atoll.proof.statement import CHANGED, Resource, materials_of, read_statement
from atoll.settings.exchange import read_manifest

TOKENIZER = "tokenizer.json"
NAMED = ("image", "lock", "source", "sbom")  # of an image, as of_run.py names them
SHOWN = 200  # characters of what others say


def made_with(update: Path) -> dict[str, str]:
    """Image, its lock, sources and SBOM, the commit and libraries; empty where nothing was said."""
    entries = _materials(update)
    image, code = entries.get("image", {}), entries.get("code", {})
    facts = {name: _of(image, "annotations", name) for name in NAMED}
    facts["image sha256"] = _of(image, "digest", "sha256")
    facts["commit"] = _of(code, "digest", "gitCommit")
    if facts["commit"] and _of(code, "annotations", CHANGED):
        facts["commit"] += "+"
    facts["libraries"] = _of(entries.get("libraries", {}), "annotations", "versions")
    return {name: value for name, value in facts.items() if value}


def tokenizer_of(update: Path) -> str:
    """The sha256 of the tokenizer that the run behind an update read with; empty: it says none."""
    return _of(_materials(update).get(f"prepared/tokenizer/{TOKENIZER}", {}), "digest", "sha256")


def _materials(update: Path) -> dict[str, Resource]:
    """By name; none where the update's manifest, which is signed, does not name the statement."""
    try:
        if read_manifest(update).provenance is None:
            return {}
        return {entry["name"]: entry for entry in materials_of(read_statement(update))}
    except UserError:
        return {}


def in_words(facts: dict[str, str]) -> str:
    """Each value in quotes: one cannot pose as several."""
    return ", ".join(f"{name} '{value.replace(chr(39), '')}'" for name, value in facts.items())


def _of(entry: dict[str, Any], part: str, name: str) -> str:
    """One fact, on one line and not long; empty where it is no text."""
    values = entry.get(part)
    value = values.get(name) if isinstance(values, dict) else None
    return printable(value, SHOWN) if isinstance(value, str) else ""
