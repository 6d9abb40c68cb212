"""ro-crate-metadata.json: the same facts as a Process Run Crate, of the Workflow Run RO-Crates.

RO-Crate 1.1 with the profile https://w3id.org/ro/wfrun/process/0.5: one action, its instrument,
what it read and what it made. Files of other places are described, not carried.
"""

import json
import mimetypes
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from atoll import run_dir
from atoll.proof.statement import CRATE, Made, Resource, instant, is_file, own_version

CONTEXTS = [
    "https://w3id.org/ro/crate/1.1/context",
    "https://w3id.org/ro/terms/workflow-run/context",
]
SPECIFICATION = "https://w3id.org/ro/crate/1.1"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
ROOT, ACTION, LICENSE = "./", "#action", "#license"
NO_LICENSE = "No license is stated; those of the data and of the base model, if any, go on."

OF_JOBS = "#run/accounting.json"
# of a job: name -> the field of its record, its unit in a text, and in QUDT
USED = {
    "nodes": ("nodes", "nodes", "NUM"),
    "elapsed": ("elapsed_seconds", "s", "SEC"),
    "energy": ("energy_joules", "J", "J"),
}
UNITS = "https://qudt.org/vocab/unit/"
# beside letters and digits, what stands in a path of a URI as it is (RFC 3986)
IN_PATHS = "/:@!$&'()*+,;=~-._"

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
        "mentions": [_to(ACTION)],
    }
    software = _software()
    action["instrument"] = _to(software["@id"])
    about = [_descriptor(), root, _profile(), _license(), software]
    graph = [*about, action, *files, *read, *logs]
    content = {"@context": CONTEXTS, "@graph": graph}
    if made.accounting is not None:
        content = with_jobs(content, made.accounting, made.jobs)
    run_dir.write_whole(export / CRATE, as_text(content))


def as_text(crate: Entity) -> str:
    return json.dumps(crate, indent=1) + "\n"


def with_jobs(crate: Entity, accounting: Resource, jobs: Sequence[Mapping[str, Any]]) -> Entity:
    """The crate with an action for each start of a job, and where they were read from."""
    graph, source = without_jobs(crate)["@graph"], _outside(accounting)
    software = next(x["@id"] for x in graph if x["@type"] == "SoftwareApplication")
    parts: list[Entity] = [source]
    actions = []
    for number, job in enumerate(jobs, 1):
        used = _usage(number, job)
        actions.append(_job(number, job, software, source) | {"resourceUsage": _all_to(used)})
        parts += [actions[-1], *used]
    changed = [
        entity | {"mentions": [*entity["mentions"], *_all_to(actions)]}
        if entity["@id"] == ROOT
        else entity
        for entity in graph
    ]
    return {**crate, "@graph": [*changed, *parts]}


def without_jobs(crate: Entity) -> Entity:
    """The crate as it was written first: the same text, so that its digest can be compared."""
    graph = [entity for entity in crate["@graph"] if not _is_of_jobs(entity)]
    changed = [
        entity | {"mentions": [m for m in entity["mentions"] if not _is_of_jobs(m)]}
        if entity["@id"] == ROOT
        else entity
        for entity in graph
    ]
    return {**crate, "@graph": changed}


def _is_of_jobs(entity: Entity) -> bool:
    return str(entity["@id"]).startswith(("#job-", OF_JOBS))


def _job(number: int, job: Mapping[str, Any], software: str, source: Entity) -> Entity:
    action: Entity = {
        "@id": f"#job-{number}",
        "@type": "CreateAction",
        "name": f"job {job['job']} of {job['cluster']}",
        "description": f"{job['state']}, exit code {job['exit_code']}, on {job['partition']}",
        "instrument": _to(software),
        "actionStatus": _to(f"http://schema.org/{_how(job)}ActionStatus"),
        "subjectOf": _to(source["@id"]),
    }
    for name, key in (("startTime", "started"), ("endTime", "ended")):
        if job[key] is not None:
            action[name] = _instant(job[key])
    return action


def _how(job: Mapping[str, Any]) -> str:
    """As schema.org's action status has it; a campaign's jobs may still be at their last step."""
    if job["state"] == "COMPLETED":
        return "Completed"
    return "Active" if job["ended"] is None or job["state"] == "COMPLETING" else "Failed"


def _usage(number: int, job: Mapping[str, Any]) -> list[Entity]:
    """What a job used, as the Provenance Run Crate has it: values with an identity and a unit."""
    known = {name: (job[key], *unit) for name, (key, *unit) in USED.items() if job[key] is not None}
    return [
        {
            "@id": f"#job-{number}-{name.replace(' ', '-')}",
            "@type": "PropertyValue",
            "name": name,
            "propertyID": f"urn:atoll:job:{name}",
            "value": str(value),
            "unitText": unit,
            "unitCode": f"{UNITS}{code}",
        }
        for name, (value, unit, code) in known.items()
    ]


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
    version = own_version()
    kind = {"@id": f"urn:atoll:{version}", "@type": "SoftwareApplication"}
    return {**kind, "name": "Atoll", "softwareVersion": version}


def _file(subject: Resource) -> Entity:
    entity = {"@id": _path(subject["name"]), "@type": "File", **_facts(subject)}
    kind, _ = mimetypes.guess_type(subject["name"])
    return entity | {"encodingFormat": kind or "application/octet-stream"}


def _outside(entry: Resource) -> Entity:
    """What is not in the crate, by its name; of an image or a commit, what is said of it."""
    facts = {**entry.get("digest", {}), **entry.get("annotations", {})}
    if is_file(entry):
        return {"@id": f"#{_path(entry['name'])}", "@type": "CreativeWork", **_facts(entry)}
    value = ", ".join(f"{name} {text}" for name, text in facts.items())
    named = {"name": entry["name"], "value": value}
    return {"@id": f"#{_path(entry['name'])}", "@type": "PropertyValue", **named}


def _path(name: str) -> str:
    """A name as a reference: a space in it is %20 (RO-Crate 1.1, encoding file paths)."""
    return quote(name, safe=IN_PATHS)


def _facts(entry: Resource) -> Entity:
    size, sha256 = str(entry["annotations"]["bytes"]), entry["digest"]["sha256"]
    return {"name": entry["name"], "contentSize": size, "sha256": sha256}


def _instant(seconds: float) -> str:
    return instant(seconds).replace("Z", "+00:00")  # as the profile's checks have it


def _to(identifier: str) -> Entity:
    return {"@id": identifier}


def _all_to(entities: list[Entity]) -> list[Entity]:
    return [_to(entity["@id"]) for entity in entities]
