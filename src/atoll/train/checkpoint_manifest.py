"""What a checkpoint's manifest says of its files, and whether they are still so."""

import json
import time
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.errors import UserError
from atoll.sharding.process_group import World

MANIFEST = "manifest.json"
READ_AGAIN_SECONDS = (10.0, 30.0)  # behind reads that failed


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint; `UserError` where there is none that can be read."""
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path} is no complete checkpoint", f"name one that has a {MANIFEST}")
    try:
        content: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise _broken(path, f"{MANIFEST} is not JSON: {error}") from error
    return content


def verify(path: Path, world: World) -> None:
    """Each rank checks its part of the files, before anything in them is interpreted."""
    files = manifest_of(path)["files"]
    for name in sorted(files)[world.rank :: world.size]:
        if not (path / name).is_file():
            raise _broken(path, f"{name} is missing")
        size = (path / name).stat().st_size
        if size != files[name]["bytes"]:
            raise _broken(path, f"{name} has {size} bytes, {files[name]['bytes']} were written")
        if run_dir.sha256_of(path / name) != files[name]["sha256"]:
            raise _broken(path, f"{name} does not have the sha256 it was written with")


def compared(path: Path, world: World) -> str | None:
    """What is wrong with this rank's part; a file system may be away for a moment."""
    for seconds in READ_AGAIN_SECONDS:
        try:
            return _different(path, world)
        except OSError:
            time.sleep(seconds)
    try:
        return _different(path, world)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read: {error.strerror or error}",
            "start the run again when its file system answers; if it never does, it goes on from "
            f"the checkpoint before without this one: rm -r {path}",
        ) from error


def _different(path: Path, world: World) -> str | None:
    try:
        verify(path, world)
    except UserError as error:
        return error.found
    return None


def _broken(path: Path, what: str) -> UserError:
    return UserError(
        f"checkpoint {path} is corrupted: {what}",
        f"remove it (rm -r {path}): the run then goes on from the checkpoint before it",
    )
