"""What of a run has a name of the hub, and where its nodes look for it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from atoll.settings import Run


def hub_home(run: Run, environment: Mapping[str, str]) -> Path:
    """`HF_HOME` as the run's job has it: its own setting, else that of the shell that submits."""
    named = run.folders.caches.get("HF_HOME") or environment.get("HF_HOME")
    return Path(named or Path.home() / ".cache" / "huggingface")


def hub_cache(run: Run, environment: Mapping[str, str]) -> Path:
    """Where models and data sets of the hub are, for the run's job."""
    named = run.folders.caches.get("HF_HUB_CACHE") or environment.get("HF_HUB_CACHE")
    return Path(named or hub_home(run, environment) / "hub")


def hub_names(run: Run) -> Iterator[tuple[str, str, str]]:
    """Setting, name, and the folder of the cache that it would be in."""
    models = {"model.source": run.model.source, "tokenizer.path": run.tokenizer.path}
    for setting, name in models.items():
        if name and not name.startswith("/"):
            yield setting, name, f"models--{name.replace('/', '--')}"
    for data in run.data.each:
        if data.hub and not data.hub.startswith("/"):
            yield "data.hub", data.hub, f"datasets--{data.hub.replace('/', '--')}"
