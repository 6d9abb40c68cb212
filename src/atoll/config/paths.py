"""Paths of a run that hold wherever its job will run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atoll import run_dir
from atoll.config.chat_templates import template_text
from atoll.settings import Data, Run, Source

Text = TypeVar("Text", Data, Source)

# Where Hugging Face's libraries keep what they fetched (manuals of huggingface_hub, datasets).
CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")


def clone_around(start: Path) -> Path | None:
    """The clone that a folder is in, or is."""
    for folder in (start, *start.parents):
        if (folder / "sbatch" / "train.sbatch").is_file() and (folder / "hydra_conf").is_dir():
            return folder
    return None


def with_absolute_paths(run: Run, start: Path, home: Path, images: Path) -> Run:
    """The run with relative paths taken from `start`; names of the hub stay as they are.

    home: where its folders start, so that the same line finds them from wherever it is typed;
    images: where that of the images does.
    """

    def path(given: Path | None, start: Path = start) -> Path | None:
        return given and Path(absolute(given, start))

    data, image, model, tokenizer = run.data, run.image, run.model, run.tokenizer
    network = run.facility.network
    libraries = [absolute(folder, start) for folder in network.libraries]
    of_network = {"plugin": path(network.plugin), "libraries": libraries}
    are_files = data.source != "python_stdlib"
    tasks_folder = run.evaluation.tasks_folder
    held_out = [absolute(file, start) for file in data.validation.files]
    caches = {name: path(folder, home) for name, folder in run.folders.caches.items()}
    lora = model.lora and model.lora.model_copy(update={"start": path(model.lora.start)})
    updates: dict[str, dict[str, Any]] = {
        "folders": {name: path(folder, home) for name, folder in run.folders if name != "caches"}
        | {"images": path(run.folders.images, images), "caches": caches},
        "image": {"file": path(image.file), "verify_key": path(image.verify_key)},
        "facility": {
            "hosts_file": path(run.facility.hosts_file),
            "network": network.model_copy(update=of_network),
        },
        "model": {"source": path_or_name(model.source, start), "lora": lora},
        "checkpoint": {
            "initial_load_path": path(run.checkpoint.initial_load_path),
            "optimizer_load_path": path(run.checkpoint.optimizer_load_path),
        },
        "tokenizer": {
            "path": path_or_name(tokenizer.path, start),
            "chat_template": template_text(tokenizer.chat_template, start),
        },
        "evaluation": {"tasks_folder": tasks_folder and absolute(tasks_folder, start)},
        "data": {
            "files": [absolute(file, start) if are_files else file for file in data.files],
            "hub": path_or_name(data.hub, start),
            "validation": data.validation.model_copy(update={"files": held_out}),
            "sources": [_absolute_source(data, source, start) for source in data.sources],
        },
    }
    groups = {name: getattr(run, name).model_copy(update=new) for name, new in updates.items()}
    return run.model_copy(update=groups)


def _absolute_source(data: Data, source: Source, start: Path) -> Source:
    update: dict[str, Any] = {"hub": path_or_name(source.hub, start)}
    if source.files and data.kind_of(source) != "python_stdlib":
        update["files"] = [absolute(file, start) for file in source.files]
    if source.validation is not None:
        held_out = [absolute(file, start) for file in source.validation.files]
        update["validation"] = source.validation.model_copy(update={"files": held_out})
    return source.model_copy(update=update)


def with_put_away(run: Run, start: Path) -> Run:
    """The run with the paths of its data sets' folders, where these are gone and have tokens.

    By their names alone they would be data sets of the hub, and this another run without tokens.
    """
    names = sorted({data.hub for data in run.data.each if data.hub and data.hub[0] != "/"})
    if not names or _has_tokens(run):
        return run
    folders = (_in_folders(run, gone, start) for gone in (*([name] for name in names), names))
    return next(filter(_has_tokens, folders), run)


def _has_tokens(run: Run) -> bool:
    return (run_dir.prepared(run) / "manifest.json").is_file()


def _in_folders(run: Run, names: Sequence[str], start: Path) -> Run:
    """The run with the data sets of these names in folders from `start`."""

    def of(text: Text) -> Text:
        if text.hub is None or text.hub not in names:
            return text
        return text.model_copy(update={"hub": absolute(text.hub, start)})

    data = of(run.data.model_copy(update={"sources": list(map(of, run.data.sources))}))
    return run.model_copy(update={"data": data})


def with_caches(run: Run, environment: Mapping[str, str]) -> Run:
    """The run with the shell's own caches of the hub, so that its job and container have them."""
    named = {name: Path(environment[name]) for name in CACHES if environment.get(name)}
    if older := environment.get("HUGGINGFACE_HUB_CACHE"):
        named.setdefault("HF_HUB_CACHE", Path(older))
    home = Path(os.path.realpath(Path.home()))
    usual = Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    real = Path(os.path.realpath(usual))
    if _reads_of_the_hub(run) and not real.is_relative_to(home):  # which containers see
        named.setdefault("HF_HOME", real)
    here = {name: path for name, path in named.items() if path.is_absolute() and path.is_dir()}
    folders = run.folders.model_copy(update={"caches": {**here, **run.folders.caches}})
    return run.model_copy(update={"folders": folders})


def _reads_of_the_hub(run: Run) -> bool:
    names = [run.model.source, run.tokenizer.path, *(data.hub for data in run.data.each)]
    if run.evaluation.tasks and run.folders.bundle is None:  # whose data the harness fetches
        return True
    return any(name and not name.startswith("/") for name in names)


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
    looks_like_one = text.startswith(("/", "./", "../", "~")) or text.endswith("/")
    if looks_like_one or (start / text).exists():
        return absolute(text, start)
    return text
