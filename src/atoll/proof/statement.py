"""provenance.json of an export: an in-toto statement of its files, and of what made them.

in-toto's Statement v1, its predicate SLSA's provenance v1 (slsa.dev/spec/v1.0/provenance). A name
begins with the place of its file: run/, prepared/, campaign/; nothing says where a place is.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from atoll import run_dir
from atoll.errors import UserError, printable

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# of an export, and never copied from one into another
CARD, CRATE, NAME = "README.md", "ro-crate-metadata.json", "provenance.json"
SIGNATURE, SCORES = f"{NAME}.sig", "scores.json"
OWN = {CARD, CRATE, NAME, SIGNATURE, SCORES}
KINDS = ("run", "campaign")
WEIGHTS, LAST, AVERAGE = "weights", "last step", "average"
CHANGED = "changed since"  # of code: files differ from its commit
MAX_BYTES = 1 << 26  # a longer statement is not read
MAX_NAME, MAX_PART = 2000, 255  # of a file: bytes, and those between slashes
# what JSON of others may end in: a size of 1e999 is an OverflowError
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError)

Resource = dict[str, Any]  # in-toto's ResourceDescriptor: name, digest, annotations


def resource(place: str, folder: Path, name: str) -> Resource:
    """A file by its bytes and sha256."""
    path = folder / name
    return described(f"{place}/{name}", path.stat().st_size, run_dir.sha256_of(path))


def described(name: str, size: int, sha256: str) -> Resource:
    return {"name": name, "digest": {"sha256": sha256}, "annotations": {"bytes": size}}


def said(name: str, **annotations: str) -> Resource:
    """What is known by its name; without a digest a descriptor needs a uri (in-toto's v1)."""
    return {"name": name, "uri": f"urn:atoll:{name}", "annotations": annotations}


def grown(place: str, folder: Path, name: str) -> Resource:
    """A file that only grows, as long as it is now: what comes later changes nothing of this."""
    size = (folder / name).stat().st_size
    record = described(f"{place}/{name}", size, sha256_of_first(folder / name, size))
    record["annotations"]["grows"] = True
    return record


def sha256_of_first(path: Path, size: int) -> str:
    """The sha256 of a file's first bytes."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while size > 0 and (piece := file.read(min(size, 4 << 20))):
            hasher.update(piece)
            size -= len(piece)
    return hasher.hexdigest()


def existing(folder: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if (folder / name).is_file()]


@dataclass(frozen=True)
class Made:
    """What is known of how an export came to be."""

    kind: str  # run or campaign
    name: str
    materials: list[Resource]
    logs: list[Resource]
    began: float | None = None  # seconds since 1970
    accounting: Resource | None = None  # the file that these are from
    jobs: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[Resource] = field(default_factory=list)  # what is named, and not at hand
    weights: str = ""  # of a run's: those of its last step, or their average over steps


def subjects_of(export: Path, known: Mapping[str, Resource]) -> list[Resource]:
    """Every file of an export but scores, which may be measured again, whoever does it.

    known: those whose digests were taken as they were written.
    """
    files = sorted(path for path in export.rglob("*") if path.is_file())
    names = [path.relative_to(export).as_posix() for path in files]
    stated = [name for name in names if name not in (CRATE, NAME, SIGNATURE, SCORES)]
    return [known.get(name) or {**resource("", export, name), "name": name} for name in stated]


def remove_cut_off(export: Path, name: str = "*") -> None:
    """Remove what a kill left of files that were being written: it is no part of an export."""
    for path in export.glob(f".{name}.partial"):
        path.unlink(missing_ok=True)


def write_statement(export: Path, made: Made, subjects: list[Resource]) -> None:
    """Write it, the last file of an export."""
    accounting = [made.accounting] if made.accounting else []
    weights = {WEIGHTS: made.weights} if made.weights else {}
    content = {
        "_type": STATEMENT,
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"urn:atoll:{made.kind}:1",
                "externalParameters": {made.kind: made.name, **weights},
                "resolvedDependencies": made.materials,
            },
            "runDetails": {
                "builder": {"id": "urn:atoll", "version": {"atoll": own_version()}},
                "metadata": {"invocationId": made.name, "finishedOn": instant(time.time())},
                "byproducts": [*made.logs, *accounting, *made.gaps],
            },
        },
    }
    (export / SIGNATURE).unlink(missing_ok=True)  # of an older statement
    run_dir.write_whole(export / NAME, json.dumps(content, indent=1) + "\n")


def own_version() -> str:
    """Of the installed package; "unknown" where a clone runs that nobody installed."""
    try:
        return metadata.version("atoll")
    except metadata.PackageNotFoundError:
        return "unknown"


def instant(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def read_statement(export: Path) -> dict[str, Any]:
    """The statement of an export; `UserError` where there is none, or it is of another kind."""
    path = export / NAME
    if not path.is_file():
        hint = "give an export that this Atoll wrote: RUN/export, or CAMPAIGN/round-N/global/export"
        raise UserError(f"{path} is missing: nothing says what made this model", hint)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        content: dict[str, Any] = json.loads(path.read_bytes().decode())
        if content["_type"] != STATEMENT or content["predicateType"] != PREDICATE:
            raise ValueError(f"of type {content['predicateType']}")
        for entry in [*content["subject"], *materials_of(content), *logs_of(content)]:
            _check(entry)
        for entry in content["subject"]:
            if "sha256" not in entry["digest"]:
                raise ValueError("a file without a digest")
            int(entry["annotations"]["bytes"])
        if kind_of(content) not in KINDS:
            raise ValueError(f"of {kind_of(content)}")
        if weights_of(content) not in ("", LAST, AVERAGE):
            raise ValueError(f"of weights {weights_of(content)}")
    except UNREADABLE as error:
        why = printable(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{path} is no statement of Atoll ({why})", "do not use it") from None
    return content


def _check(entry: Resource) -> None:
    """A plain relative name, digests that are text, and facts under names."""
    name = entry["name"]
    path = PurePosixPath(name)
    parts = path.parts
    is_long = len(name.encode()) > MAX_NAME or any(len(part.encode()) > MAX_PART for part in parts)
    # run//etc/hostname would be another place's
    is_plain = name.isprintable() and not name.startswith("/") and name == path.as_posix()
    if not parts or ".." in parts or is_long or not is_plain:
        raise ValueError(f"the name {name!r}")
    if not isinstance(entry.get("annotations", {}), dict):
        raise ValueError(f"the annotations of {name}")
    if any(not isinstance(digest, str) for digest in entry.get("digest", {}).values()):
        raise ValueError(f"the digest of {name}")
    if is_file(entry):
        int(entry["annotations"]["bytes"])


def is_file(entry: Resource) -> bool:
    """Whether it is a file of a place, and so looked at; an image is by its name alone."""
    return "/" in entry["name"] and "sha256" in entry.get("digest", {})


def materials_of(statement: dict[str, Any]) -> list[Resource]:
    materials: list[Resource] = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    return materials


def logs_of(statement: dict[str, Any]) -> list[Resource]:
    logs: list[Resource] = statement["predicate"]["runDetails"]["byproducts"]
    return logs


def weights_of(statement: dict[str, Any]) -> str:
    """LAST or AVERAGE of a run's export; empty: a campaign's, or of an Atoll that did not say."""
    return str(statement["predicate"]["buildDefinition"]["externalParameters"].get(WEIGHTS, ""))


def kind_of(statement: dict[str, Any]) -> str:
    """run or campaign."""
    return str(statement["predicate"]["buildDefinition"]["buildType"]).split(":")[2]
