"""The statement of a run's export: what the run read, its checkpoint, its jobs and logs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.proof.accounting import not_kept
from atoll.proof.card import run_card
from atoll.proof.prove import prove
from atoll.proof.statement import (
    AVERAGE,
    CHANGED,
    LAST,
    Made,
    Resource,
    described,
    existing,
    grown,
    resource,
    said,
)
from atoll.settings import Run

CONFIG = "config.json"
SBOM = Path("/opt/atoll/sbom/sbom.cdx.json")  # in an image: containers/post.sh
# what later starts, and whoever looks at the run, write on
SETTINGS = ("run.yaml", "image.json", "reference.npz")  # the last is what DPO is held against
LOGS = ("jobs.txt", "metrics.jsonl", "faults.jsonl", "restarts.jsonl", "ledger.jsonl")


def prove_run(
    export: Path,
    run: Run,
    run_folder: Path,
    made_of: Mapping[str, str],
    known: Mapping[str, Mapping[str, str | int]],
    is_average: bool = False,
) -> None:
    """Write the proof into a whole export. made_of: of image, code and libraries.

    known: name -> bytes and sha256 of files of the export, as they were written.
    is_average: of the weights over steps (optimizer.ema_decay), not of the last step's.
    """
    materials = [resource("run", run_folder, name) for name in existing(run_folder, SETTINGS)]
    materials += _checkpoint(run_folder) + _prepared(run_dir.prepared(run)) + _sources(run)
    materials += _named(made_of, run_folder) + _base(run)
    materials += [_sbom(run_folder)]
    records = run_dir.metrics(run_folder)
    result, config = (_json(file) for file in (run_dir.result_file(run_folder), export / CONFIG))
    card = run_card(run, config, records, result, made_of, is_average)
    began = next((record["time"] for record in records if "time" in record), None)
    logs = [grown("run", run_folder, name) for name in existing(run_folder, LOGS)]
    logs += [resource("run", run_folder, name) for name in existing(run_folder, ["result.json"])]
    subjects = {
        name: described(name, int(facts["bytes"]), str(facts["sha256"]))
        for name, facts in known.items()
    }
    gaps = [not_kept(run.facility.scheduler)]
    weights = AVERAGE if is_average else LAST
    made = Made("run", run.name, materials, logs, began, gaps=gaps, weights=weights)
    prove(export, made, card, subjects)


def _json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return content


def _checkpoint(run_folder: Path) -> list[Resource]:
    """The newest, by its manifest, which has the digests of its files."""
    steps = run_dir.complete_checkpoints(run_folder)[-1:]
    names = [
        f"{run_dir.checkpoint(run_folder, step).relative_to(run_folder)}/manifest.json"
        for step in steps
    ]
    return [resource("run", run_folder, name) for name in names]


def _prepared(folder: Path) -> list[Resource]:
    """The tokens, by their manifest, which has the digests of all shards; and the tokenizer."""
    tokenizer = sorted(path for path in (folder / "tokenizer").glob("*") if path.is_file())
    names = ["manifest.json", *(f"tokenizer/{path.name}" for path in tokenizer)]
    return [resource("prepared", folder, name) for name in existing(folder, names)]


def _sources(run: Run) -> list[Resource]:
    """Of several sources, each by its own manifest."""
    folders = zip(run.data.sources, run_dir.prepared_sources(run), strict=False)
    return [
        resource(f"prepared.{source.name}", folder, name)
        for source, folder in folders
        for name in existing(folder, ["manifest.json"])
    ]


def _sbom(run_folder: Path) -> Resource:
    """What is in the image, kept beside the run: the image may be gone when somebody asks."""
    if not SBOM.is_file():
        why = "the run was made in no image of Atoll's"
        return said("sbom", packages=why)
    file = run_dir.sbom_file(run_folder)
    run_dir.write_whole(file, SBOM.read_bytes())
    return resource("run", run_folder, file.name)


def _named(made_of: Mapping[str, str], run_folder: Path) -> list[Resource]:
    """What is known by its name alone: it is not at hand when an export is verified."""
    image = {name: made_of[name] for name in ("image", "lock", "source", "sbom") if name in made_of}
    submitted = _json(run_dir.image_file(run_folder))
    digest = {"digest": {"sha256": submitted["sha256"]}} if submitted else {}
    return [
        {**said("image", **image), **digest},
        {**said("code"), **_of_code(made_of.get("commit", ""))},
        said("libraries", versions=made_of["libraries"]),
    ]


def _base(run: Run) -> list[Resource]:
    """What the weights were before, by name alone: its files are not looked at."""
    model, began = run.model, dict[str, Any]()
    if model.source is not None:
        began = {"model": model.source, "revision": model.revision}
    began["adapter"] = model.lora.start if model.lora is not None else None
    began["checkpoint"] = run.checkpoint.initial_load_path
    named = {what: Path(name) for what, name in began.items() if name is not None}
    # of a path the end alone: RUN/export, BUNDLE/model
    shown = {
        what: "/".join(path.parts[-2:]) if path.is_absolute() else str(path)
        for what, path in named.items()
    }
    return [said("base", **shown)] if named else []


def _of_code(commit: str) -> Resource:
    """The commit; of a clone whose files differ from it, that they do."""
    if not commit:
        return {"annotations": {"commit": "unknown"}}
    changed = {"annotations": {CHANGED: "yes"}} if commit.endswith("+") else {}
    return {"digest": {"gitCommit": commit.rstrip("+")}, **changed}
