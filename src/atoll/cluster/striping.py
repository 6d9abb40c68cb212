"""Advice on Lustre: a large file that all ranks read at once wants more than one storage target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.cluster.scheduler import answer_lines

# Lustre's usual layout keeps a file on one target; below this size that is fast enough.
LARGE_BYTES = 1 << 30
MOST_STRIPES = 16
LAYOUT = "-c {stripes} -S 4M"


def before_copying(files: Mapping[str, Mapping[str, Any]]) -> str:
    """What to type before a bundle is copied to Lustre, or nothing where no file is large.

    files: as in the bundle's manifest, name -> facts with its `bytes`.
    """
    large = _large(files)
    if not large:
        return ""
    return (
        f"{len(large)} of its files are larger than 1 GiB; on Lustre make the folder first, and "
        f"spread what comes into it: lfs setstripe {_layout(max(large.values()))} FOLDER"
    )


def after_copying(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str:
    """What to type where a large file lies on one target of a Lustre file system, else nothing."""
    large = _large(files)
    narrow = [name for name in sorted(large) if _stripes(folder / name) == 1]
    if not narrow:
        return ""
    return (
        f"{len(narrow)} large files lie on one Lustre target each, and all ranks read them: "
        f"lfs migrate {_layout(max(large[name] for name in narrow))} {folder / narrow[0]}, "
        "and so on"
    )


def _large(files: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    return {name: facts["bytes"] for name, facts in files.items() if facts["bytes"] > LARGE_BYTES}


def _layout(size: int) -> str:
    """One target for each GiB, as long as that is few of the targets that a system has."""
    return LAYOUT.format(stripes=min(MOST_STRIPES, -(-size // LARGE_BYTES)))


def _stripes(path: Path) -> int | None:
    """On how many targets a file lies; None where it is not on Lustre."""
    lines = answer_lines(["lfs", "getstripe", "--stripe-count", str(path)])
    return int(lines[0]) if lines and lines[0].isdigit() else None
