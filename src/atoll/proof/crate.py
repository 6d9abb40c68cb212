"""ro-crate-metadata.json: the same facts as a Process Run Crate, of the Workflow Run RO-Crates.

RO-Crate 1.1 with the profile https://w3id.org/ro/wfrun/process/0.5: one action, its instrument,
what it read and what it made. Files of other places are described, not carried.
"""

import json
import mimetypes
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.proof.statement import CRATE, Made, Resource, instant

CONTEXTS = [
    "https://w3id.org/ro/crate/1.1/context",
    "https://w3id.org/ro/terms/workflow-run/context",
]
SPECIFICATION = "https://w3id.org/ro/crate/1.1"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
ROOT, ACTION, LICENSE = "./", "#action", "#license"
NO_LICENSE = "No license is stated; those of the data and of the base model, if any, go on."

Entity = dict[str, Any]


def write_crate(export: Path, made: Made, subjects: list[Resource]) -> None:
    """Describe the export and what made it; `subjects` are its files."""
    now = _instant(time.time())
    files = [_file(subject) for subject in subjects]
    read, logs = ([_outside(entry) for entry in part] for part in (made.materials, made.logs))
    what = f"Model of the Atoll {made.kind} {made.name}"
    action: Entity = {
        "@id": ACTION,
        "@type": "CreateAction",
        "name": f"{made.kind} {made.name}",
        "description": f"What the {made.kind} {made.name} read and made.",
        "object": _all_to(read),
        "result": _all_to(files),
        "subjectOf": _all_to(logs),
        "endTime": now,
        "actionStatus": _to("http://schema.org/CompletedActionStatus"),
    }
    if made.began is not None:
        action["startTime"] = _instant(made.began)
    root = {
        "@id": ROOT,
        "@type": "Dataset",
        "name": what,
        "description": f"{what}: weights, tokenizer, and what they were made from.",
        "datePublished": now,
        "license": _to(LICENSE),
        "conformsTo": _to(PROFILE),
        "hasPart": _all_to(files),
        "mentions": _to(ACTION),
    }
    software = _software()
    action["instrument"] = _to(software["@id"])
    about = [_descriptor(), root, _profile(), _license(), software]
    graph = [*about, action, *files, *read, *logs]
    content = {"@context": CONTEXTS, "@graph": graph}
    run_dir.write_whole(export / CRATE, json.dumps(content, indent=1) + "\n")


def _descriptor() -> Entity:
    entity = {"@id": CRATE, "@type": "CreativeWork", "about": _to(ROOT)}
    return entity | {"conformsTo": _to(SPECIFICATION)}


def _profile() -> Entity:
    named = {"name": "Process Run Crate", "version": "0.5"}
    return {"@id": PROFILE, "@type": "CreativeWork", **named}


def _license() -> Entity:
    return {
        "@id": LICENSE,
        "@type": "CreativeWork",
        "name": "not stated",
        "description": NO_LICENSE,
    }


def _software() -> Entity:
    version = metadata.version("atoll")
    kind = {"@id": f"urn:atoll:{version}", "@type": "SoftwareApplication"}
    return {**kind, "name": "Atoll", "softwareVersion": version}


def _file(subject: Resource) -> Entity:
    entity = {"@id": subject["name"], "@type": "File", **_facts(subject)}
    kind, _ = mimetypes.guess_type(subject["name"])
    return entity | {"encodingFormat": kind or "application/octet-stream"}


def _outside(entry: Resource) -> Entity:
    """What is not in the crate, by its name; of an image or a commit, what is said of it."""
    said = {**entry.get("digest", {}), **entry.get("annotations", {})}
    if "sha256" in said:
        return {"@id": f"#{entry['name']}", "@type": "CreativeWork", **_facts(entry)}
    value = ", ".join(f"{name} {text}" for name, text in said.items())
    named = {"name": entry["name"], "value": value}
    return {"@id": f"#{entry['name']}", "@type": "PropertyValue", **named}


def _facts(entry: Resource) -> Entity:
    size, sha256 = str(entry["annotations"]["bytes"]), entry["digest"]["sha256"]
    return {"name": entry["name"], "contentSize": size, "sha256": sha256}


def _instant(seconds: float) -> str:
    return instant(seconds).replace("Z", "+00:00")  # as the profile's checks have it


def _to(identifier: str) -> Entity:
    return {"@id": identifier}


def _all_to(entities: list[Entity]) -> list[Entity]:
    return [_to(entity["@id"]) for entity in entities]
