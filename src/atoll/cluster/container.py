"""How a command enters the container, and which of the host's folders it sees there."""

import os
from pathlib import Path

from atoll.settings import Run

PACKAGE, PACKAGE_INSIDE = Path(__file__).parents[1], "/opt/atoll/src/atoll"


def container_prefix(run: Run) -> list[str]:
    """What stands before a command so that it runs in the image; nothing without an image."""
    image = run.image
    if image.file is None:
        return []
    mounts = [word for bind in binds(run) for word in ("--bind", bind)]
    return [run.facility.container, "-q", "exec", *image.run_flags, *mounts, str(image.file)]


def binds(run: Run) -> list[str]:
    """The facility's mounts, then the folders of the run itself, links followed."""
    folders: dict[str, str] = {}
    for path in sorted({str(path) for path in own_folders(run)}):
        inside_another = any(path.startswith(f"{other}/") for other in folders)
        if not inside_another:
            folders[path] = bound(path)
    source = [f"{PACKAGE}:{PACKAGE_INSIDE}"] if run.image.bind_source else []
    return [*run.facility.binds, *source, *folders.values()]


def own_folders(run: Run) -> list[Path]:
    """The folders that a run itself reads and writes."""
    return [run.folders.runs, run.folders.prepared, *_given_files(run)]


def bound(path: str) -> str:
    """The bind of a folder under the name it was given, wherever its links lead."""
    real = os.path.realpath(path)
    return path if real == path else f"{real}:{path}"


def _given_files(run: Run) -> list[Path]:
    """The folders of the model, tokenizer and text files that a run names by path."""
    named = [run.model.source, run.tokenizer.path, *run.data.files, *run.data.validation.files]
    named += [str(run.folders.bundle)] if run.folders.bundle else []
    paths = [Path(name) for name in named if name and name.startswith("/")]
    return [path if path.is_dir() else _first_folder(path) for path in paths]


def _first_folder(path: Path) -> Path:
    """The folder above a file, or above the first star of a pattern."""
    plain = [part for part in path.parents if not set("*?[") & set(str(part))]
    return plain[0]
