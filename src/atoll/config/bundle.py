"""A bundle: one folder with all that a run reads, for facilities without a network.

A run whose model is another folder that is here, as in a campaign's rounds, takes the tokens alone.

BUNDLE/
  request.yaml   the run it is made for, written first
  model/         weights (safetensors), config and tokenizer, where the model has a source
  tokens/        the prepared data with its own manifest
  tasks/         what evaluation.tasks read, where there are any
  bundle.json    written last: what it was made for, and the sha256 of every file
"""

import json
from collections.abc import Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any, TypeVar

import yaml

from atoll import run_dir
from atoll.config.held_out import tail_of
from atoll.errors import UserError
from atoll.settings import Data, Run, Source
from atoll.settings.data import Validation

Text = TypeVar("Text", Data, Source)


def with_bundle(run: Run) -> Run:
    """The run with its model read from the bundle it names; any other run stays as it is.

    Raises `UserError` where the bundle is incomplete, cut short or made for another run, or where
    its tokens mean something else to the run's own model.
    """
    folder = run.folders.bundle
    if folder is None:
        return run
    manifest = read_manifest(folder)
    run = _with_its_text(run, folder)
    own_model = _has_own_model(run, manifest)
    _refuse_another(_as_made(run, folder, manifest) if own_model else run, folder, manifest)
    _refuse_other_tasks(run, folder, manifest)
    _refuse_wrong_sizes(folder, manifest)
    run = _with_own_tasks(run, folder)
    if own_model:
        _refuse_another_tokenizer(run, folder)
    if run.model.source is None or own_model:
        return run
    model = run.model.model_copy(update={"source": str(folder / "model"), "revision": None})
    return run.model_copy(update={"model": model})


def made_for(run: Run) -> dict[str, Any]:
    """What must be the same in the run that made a bundle and in one that uses it."""
    source = {"model.source": run.model.source, "model.revision": run.model.revision}
    return source | {"data": run_dir.prepared_digest(run)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a whole bundle says of itself."""
    path = run_dir.bundle_manifest(folder)
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"folders.bundle={folder} holds no bundle.json: it is no bundle, or not a whole one",
            "where there is a network: atoll prepare --into BUNDLE …; run again, it goes on",
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", "copy the bundle again") from None
    return manifest


def _request(folder: Path) -> dict[str, Any]:
    """The settings of the run that a bundle was made for."""
    path = run_dir.bundle_request(folder)
    try:
        request = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError):
        request = None
    groups = request if isinstance(request, dict) else {}
    if not all(isinstance(groups.get(name), dict) for name in ("data", "tokenizer")):
        state = "does not have the settings of a run" if path.is_file() else "is missing"
        raise UserError(
            f"the bundle {folder} is not whole: {path} {state}",
            "copy the bundle again: rsync -a goes on from there",
        )
    return groups


def _with_its_text(run: Run, folder: Path) -> Run:
    """The run with its text as it was named where the bundle was made, in folders of that machine.

    Where file names or a setting differ it stays as it is: it is another text.
    """
    made = _request(folder)["data"]
    own, theirs = run.data.sources, made.get("sources") or []
    if own and [source.name for source in own] == [source.get("name") for source in theirs]:
        own = list(map(_as_named, own, run.data.each, theirs))
    data = _as_named(run.data, run.data, made).model_copy(update={"sources": own})
    return run.model_copy(update={"data": data})


def _as_named(own: Text, data: Data, made: dict[str, Any]) -> Text:
    """A text, or a source, by the files that were named there, where their names are alike.

    data: the text with what a source leaves unset.
    """
    update: dict[str, Any] = {}
    are_files = data.source != "python_stdlib"  # its patterns of modules are of no folder
    if are_files and own.files and _names(own.files) == _names(made.get("files")):
        update["files"] = made["files"]
    if _is_same_folder(own.hub or "", made.get("hub") or ""):
        update["hub"] = made["hub"]
    held_out = made.get("validation")
    if held_out and _is_alike(data, held_out):
        update["validation"] = Validation(**held_out)
    return own.model_copy(update=update)


def _is_same_folder(hub: str, made: str) -> bool:
    """A data set in a folder, by that folder's name; two names of the hub are two data sets.

    One that is not here is named as it was typed, from a folder that differs.
    """
    own = Path(hub).name if hub.startswith("/") else hub
    return made.startswith("/") and bool(own) and made.endswith(f"/{own}")


def _names(files: Sequence[str] | None) -> list[str]:
    return [_name(Path(file)) for file in files or []]


def _name(path: Path) -> str:
    """A file's own; a pattern's with the folder that it begins in: `*.txt` says nothing."""
    plain = next(part for part in (path, *path.parents) if not has_magic(str(part)))
    return path.name if plain == path else path.relative_to(plain.parent).as_posix()


def _is_alike(data: Data, made: Mapping[str, Any]) -> bool:
    """Whether the same is held out: of one file its end, also where that file is not here."""
    one_file = None if any(map(has_magic, data.files)) else tail_of(data)
    mine = [held_out.model_dump() for held_out in (data.validation, one_file) if held_out]
    return any(_held_out(each) == _held_out(made) for each in mine)


def _held_out(validation: Mapping[str, Any]) -> dict[str, Any]:
    shares = {name: validation.get(name) for name in Validation.model_fields}
    return shares | {"files": _names(validation.get("files"))}


def _has_own_model(run: Run, manifest: dict[str, Any]) -> bool:
    source = run.model.source
    bundled = manifest["made_for"]["model.source"]
    return source is not None and source != bundled and Path(source).is_dir()


def _as_made(run: Run, folder: Path, manifest: dict[str, Any]) -> Run:
    """The run with the bundle's model and tokenizer: what is left to compare is the text."""
    made = manifest["made_for"]
    source = {"source": made["model.source"], "revision": made["model.revision"]}
    path = _request(folder)["tokenizer"].get("path")
    tokenizer = run.tokenizer.model_copy(update={"path": path})
    model = run.model.model_copy(update=source)
    return run.model_copy(update={"model": model, "tokenizer": tokenizer})


def _refuse_another_tokenizer(run: Run, folder: Path) -> None:
    own = Path(run.tokenizer.path or str(run.model.source)) / "tokenizer.json"
    theirs = folder / "tokens" / "tokenizer" / "tokenizer.json"
    if own.is_file() and run_dir.sha256_of(own) != run_dir.sha256_of(theirs):
        raise UserError(
            f"the tokens of the bundle {folder} were made with another tokenizer than {own}",
            "make the bundle with this model's tokenizer: tokenizer.path=FOLDER",
        )


def _refuse_another(run: Run, folder: Path, manifest: dict[str, Any]) -> None:
    before, now = manifest["made_for"], made_for(run)
    for name in now:
        if before.get(name) != now[name]:
            same = "" if name == "data" else f"{name}={before.get(name) or 'null'} here too, or "
            raise UserError(
                f"the bundle {folder} was made with {name}={before.get(name)}, this run has "
                f"{now[name]}",
                f"{same}make one with the settings of this run: atoll prepare --into ANOTHER …",
            )


def refuse_other_tasks(run: Run) -> None:
    """Refuse tasks whose data the run's bundle lacks; a run without a bundle has them elsewhere."""
    if run.folders.bundle is not None:
        _refuse_other_tasks(run, run.folders.bundle, read_manifest(run.folders.bundle))


def _refuse_other_tasks(run: Run, folder: Path, manifest: dict[str, Any]) -> None:
    bundled = manifest.get("tasks", [])
    if missing := [name for name in run.evaluation.tasks if name not in bundled]:
        raise UserError(
            f"the bundle {folder} holds the data of {', '.join(bundled) or 'no task'}, this run "
            f"is scored with {', '.join(missing)}",
            "make one with them: atoll prepare --into ANOTHER … "
            f"evaluation.tasks=[{','.join(run.evaluation.tasks)}]",
        )


def _with_own_tasks(run: Run, folder: Path) -> Run:
    own = run_dir.own_tasks(run_dir.tasks_folder(folder))
    if not own.is_dir():
        return run
    evaluation = run.evaluation.model_copy(update={"tasks_folder": str(own)})
    return run.model_copy(update={"evaluation": evaluation})


def _refuse_wrong_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    for name, facts in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes, not {facts['bytes']:,}"
            raise UserError(f"{path} {found}", "copy the bundle again: rsync -a goes on from there")
