"""Paths of a run that hold wherever its job will run."""

import os
from pathlib import Path

from atoll.settings import Run


def with_absolute_paths(run: Run, start: Path) -> Run:
    """The run with relative paths taken from `start`; names of the hub stay as they are."""
    validation = run.data.validation
    held_out = [absolute(file, start) for file in validation.files]
    files = [absolute(file, start) for file in run.data.files]
    file = run.image.file
    changed = {
        "folders": run.folders.model_copy(
            update={
                "runs": Path(absolute(run.folders.runs, start)),
                "prepared": Path(absolute(run.folders.prepared, start)),
            }
        ),
        "image": run.image.model_copy(update={"file": file and Path(absolute(file, start))}),
        "model": run.model.model_copy(update={"source": path_or_name(run.model.source, start)}),
        "tokenizer": run.tokenizer.model_copy(
            update={"path": path_or_name(run.tokenizer.path, start)}
        ),
        "data": run.data.model_copy(
            update={
                "files": files,
                "validation": validation.model_copy(update={"files": held_out}),
            }
        ),
    }
    return run.model_copy(update=changed)


def absolute(path: str | Path, start: Path) -> str:
    """An absolute path without `~`, `.` and `..`; links stay, a glob's stars too."""
    return os.path.normpath(start / Path(path).expanduser())


def path_or_name(text: str | None, start: Path) -> str | None:
    """A path made absolute where it looks like one or is there, else the name of a hub."""
    if text is None:
        return None
    looks_like_one = text.startswith(("/", "./", "../", "~"))
    if looks_like_one or (start / text).exists():
        return absolute(text, start)
    return text
