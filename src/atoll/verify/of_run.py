"""What a run's export was made from: the run's folder, its checkpoint, its tokens."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.errors import UserError
from atoll.proof.statement import NAME, Resource, is_file, logs_of, materials_of
from atoll.settings import load_run
from atoll.verify.lines import Line, differs, refuse_changed, resources

MAX_SETTINGS_BYTES = 1 << 20
# of a shard's record (data/shards.py): the digest's name -> what the name of its file ends in
SHARD_FILES = {
    "tokens_sha256": ".ds",
    "index_sha256": ".ds.index",
    "loss_sha256": ".ds.loss",
    "labels_sha256": ".labels",
}


def made_it(statement: dict[str, Any], run_folder: Path | None, deep: bool) -> Iterator[Line]:
    """Everything at hand; `deep`: every file that a manifest names, too."""
    entries = [*materials_of(statement), *logs_of(statement)]
    places = {"run": run_folder}
    if run_folder is not None:
        _refuse_changed_settings(entries, run_folder)
        places |= _prepared(run_folder)
    yield from resources(entries, places)
    for entry in entries if deep else []:
        place, _, name = entry["name"].partition("/")
        folder = places.get(place)
        if folder is None or not (folder / name).is_file():
            continue
        if name.startswith("checkpoints/"):
            yield _checkpoint((folder / name).parent, entry)
        elif place.startswith("prepared") and name == "manifest.json":
            yield from _shards(folder)


def _refuse_changed_settings(entries: list[Resource], run_folder: Path) -> None:
    """They are read, to find the tokens, only as they are stated."""
    file = run_dir.settings_file(run_folder)
    stated = [e for e in entries if e["name"] == f"run/{file.name}" and is_file(e)]
    if not stated:
        raise differs(f"{NAME} states no settings of the run")
    for entry in stated:
        refuse_changed(file, int(entry["annotations"]["bytes"]), entry["digest"]["sha256"])


def _prepared(run_folder: Path) -> dict[str, Path | None]:
    """Where run.yaml says that its tokens are, and those of each source, if there are any."""
    settings = run_dir.settings_file(run_folder)
    if settings.stat().st_size > MAX_SETTINGS_BYTES:  # nested without end it would take hours
        return {"prepared": None}
    try:
        run = load_run(settings)
    except UserError:  # the settings are of another time: what they say elsewhere is looked at
        return {"prepared": None}
    folders = {"prepared": run_dir.prepared(run)}
    for source, folder in zip(run.data.sources, run_dir.prepared_sources(run), strict=False):
        folders[f"prepared.{source.name}"] = folder
    return {place: folder if folder.is_dir() else None for place, folder in folders.items()}


def _checkpoint(folder: Path, entry: Resource) -> Line:
    listed: Mapping[str, Any] = json.loads((folder / "manifest.json").read_text())["files"]
    for name, facts in listed.items():
        refuse_changed(folder / name, int(facts["bytes"]), facts["sha256"])
    return Line("as stated", f"{entry['name'].rpartition('/')[0]}: {len(listed)} files")


def _shards(folder: Path) -> Iterator[Line]:
    """Of several sources the first manifest has no shards: each source's own names them."""
    content, count = json.loads((folder / "manifest.json").read_text()), 0
    for split in ("train", "validation"):
        for shard in content.get(split, []):
            for digest, ending in SHARD_FILES.items():
                path = folder / split / f"{shard['number']:05d}{ending}"
                if shard.get(digest) and shard["documents"]:
                    refuse_changed(path, None, shard[digest])
                    count += 1
    if count:
        yield Line("as stated", f"tokens: {count} files of shards")
