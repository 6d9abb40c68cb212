"""What a run is made of: image and lock, code, libraries, data and tokenizer."""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.commands import run_command
from atoll.settings import Run

# Apptainer puts an image's labels there (its manual, "Metadata").
LABELS = Path("/.singularity.d/labels.json")
LIBRARIES = ("atoll", "torch", "transformers", "tokenizers", "datasets", "deepspeed", "peft")
SHORT = 16  # digits of a digest that are recorded


def made_of(run: Run) -> dict[str, str]:
    """Names and digests by which each part is found again; what is not known is left out."""
    prepared = run_dir.prepared(run)
    parts = {
        "image": str(run.image.file.name if run.image.file else run.image.name),
        **_of_image(LABELS),
        "commit": _commit(Path(__file__).parents[3]),
        "libraries": ", ".join(_versions()),
        "data": f"{run.data.name} {_digest(prepared / 'manifest.json')}",
        "sources": ", ".join(_sources(run)),
        "tokenizer": f"{run.tokenizer.path or 'made for it'} {_of_tokenizer(prepared)}",
    }
    return {name: value.strip() for name, value in parts.items() if value.strip()}


def _sources(run: Run) -> list[str]:
    """Of several sources, each with the digest of its own manifest."""
    folders = zip(run.data.sources, run_dir.prepared_sources(run), strict=False)
    return [f"{source.name} {_digest(folder / 'manifest.json')}" for source, folder in folders]


def _of_image(labels: Path) -> dict[str, str]:
    if not labels.is_file():
        return {}
    values: dict[str, Any] = json.loads(labels.read_text())
    names = {"lock": "atoll.lock", "source": "atoll.source", "sbom": "atoll.sbom"}
    return {name: str(values[label]) for name, label in names.items() if label in values}


def _commit(clone: Path) -> str:
    """Of the clone whose code runs, in full, with a + where files differ from it."""
    if not (clone / ".git").exists():
        return ""
    argv = ["git", "-C", str(clone), "describe", "--always", "--abbrev=40"]
    argv += ["--dirty=+", "--exclude=*"]
    done = run_command(argv)
    return done.stdout.strip() if done.returncode == 0 else ""


def _versions() -> list[str]:
    versions = [f"python {platform.python_version()}"]
    for library in LIBRARIES:
        try:
            versions.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return versions


def _of_tokenizer(prepared: Path) -> str:
    files = sorted((prepared / "tokenizer").glob("*"))
    return run_dir.digest([[file.name, _digest(file)] for file in files if file.is_file()], SHORT)


def _digest(file: Path) -> str:
    return run_dir.sha256_of(file)[:SHORT] if file.is_file() else ""
