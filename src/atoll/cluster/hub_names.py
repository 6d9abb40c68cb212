"""What of a run has a name of the hub, and whether its nodes have it without a network."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from atoll import run_dir
from atoll.settings import Run


class HubName(NamedTuple):
    """A setting that names something of the hub."""

    setting: str
    name: str
    kind: str  # models or datasets


def hub_home(run: Run, environment: Mapping[str, str]) -> Path:
    """`HF_HOME` as the run's job has it: its own setting, else that of the shell that submits."""
    named = run.folders.caches.get("HF_HOME") or environment.get("HF_HOME")
    caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named or Path(caches) / "huggingface")


def hub_cache(run: Run, environment: Mapping[str, str]) -> Path:
    """Where models and data sets of the hub are, for the run's job."""
    named = run.folders.caches.get("HF_HUB_CACHE") or environment.get("HF_HUB_CACHE")
    named = named or environment.get("HUGGINGFACE_HUB_CACHE")  # its older name
    return Path(named or hub_home(run, environment) / "hub")


def is_cached(of: HubName, run: Run, environment: Mapping[str, str]) -> bool:
    """Whether it is there, in some version; data sets have a cache of their own, too."""
    if (hub_cache(run, environment) / f"{of.kind}--{of.name.replace('/', '--')}").is_dir():
        return True
    named = run.folders.caches.get("HF_DATASETS_CACHE") or environment.get("HF_DATASETS_CACHE")
    sets = Path(named or hub_home(run, environment) / "datasets")
    return of.kind == "datasets" and (sets / of.name.replace("/", "___")).is_dir()


def hub_names(run: Run) -> Iterator[HubName]:
    """What a job of the run reads; of data that is tokenised already, or in a bundle, nothing."""
    if run.model.source and not run.model.source.startswith("/"):
        yield HubName("model.source", run.model.source, "models")
    if run.folders.bundle is not None or (run_dir.prepared(run) / "manifest.json").is_file():
        return
    if run.tokenizer.path and not run.tokenizer.path.startswith("/"):
        yield HubName("tokenizer.path", run.tokenizer.path, "models")
    for data in run.data.each:
        if data.source == "hub" and data.hub and not Path(data.hub).expanduser().exists():
            yield HubName("data.hub", data.hub, "datasets")
