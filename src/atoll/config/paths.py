"""Paths of a run that hold wherever its job will run."""

import os
from pathlib import Path

from atoll.settings import Run


def with_absolute_paths(run: Run, start: Path) -> Run:
    """The run with relative paths taken from `start`; names of the hub stay as they are."""
    validation = run.data.validation
    held_out = [absolute(file, start) for file in validation.files]
    is_path = run.data.source != "python_stdlib"
    files = [absolute(file, start) if is_path else file for file in run.data.files]
    file, key = run.image.file, run.image.verify_key
    changed = {
        "folders": run.folders.model_copy(
            update={
                "runs": Path(absolute(run.folders.runs, start)),
                "prepared": Path(absolute(run.folders.prepared, start)),
                "images": Path(absolute(run.folders.images, start)),
                "bundle": run.folders.bundle and Path(absolute(run.folders.bundle, start)),
            }
        ),
        "image": run.image.model_copy(
            update={
                "file": file and Path(absolute(file, start)),
                "verify_key": key and Path(absolute(key, start)),
            }
        ),
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


def with_image_file(run: Run) -> Run:
    """The run with the image that was built last from its args file, unless it names a file."""
    image = run.image
    if image.file is not None or image.args_file is None:
        return run
    newest = run.folders.images / f"{Path(image.args_file).stem}.sif"
    # the name of the very file: a job must not find another image there than it was queued with
    update = {"file": newest.resolve() if newest.exists() else newest}
    return run.model_copy(update={"image": image.model_copy(update=update)})


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
