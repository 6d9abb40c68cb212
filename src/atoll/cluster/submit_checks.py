"""What is refused before a run is queued or started: its nodes, memory, texts and surroundings."""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from atoll import run_dir
from atoll.cluster import limits
from atoll.cluster.device_here import check_device
from atoll.cluster.fit import check_fit
from atoll.cluster.hub_names import hub_cache, hub_names, is_cached
from atoll.cluster.start import runs_here
from atoll.config.identity import check_same_run
from atoll.errors import UserError
from atoll.images.check import check_image
from atoll.settings import Data, Run, load_run
from atoll.settings.named_files import named_files, refuse_no_text


def check_before_start(run: Run, here: bool, environment: Mapping[str, str]) -> None:
    """All of `check`, and what a dry run does without: device, image, environment and texts."""
    check(run, here, environment)
    check_device(run)
    check_image(run)
    check_environment(run)
    if not _waits_for_another(run):
        check_source(run)
    check_reference(run)
    check_data(run)
    check_hub(run, environment)


def check(run: Run, here: bool, environment: Mapping[str, str]) -> None:
    """Refuse what the facility, its devices, the allocation or the run's own past do not allow."""
    limits.check_supported(run)
    limits.check_nodes(run)
    if here:
        limits.check_allocation(run, environment)
    elif run.facility.scheduler != "none":
        limits.check_queue(run)
    if runs_here(run, here):
        check_source(run)
    check_fit(run)
    check_same_run(run, run_dir.folder(run))


def check_source(run: Run) -> None:
    """Refuse a folder of a model, a checkpoint or tasks that is not there."""
    source = run.model.source
    if source is not None and source.startswith("/"):
        if not Path(source).is_dir():
            raise UserError(f"no such folder: model.source={source}", "check the path")
        if not (Path(source) / "config.json").is_file():
            raise UserError(
                f"no config.json in model.source={source}",
                "give the folder of a Hugging Face model",
            )
    tasks = run.evaluation.tasks_folder
    if tasks is not None and not Path(tasks).is_dir():
        raise UserError(f"no such folder: evaluation.tasks_folder={tasks}", "check the path")
    if run_dir.complete_checkpoints(run_dir.folder(run)):
        return  # of its own, from which it goes on: what it began with may have been put away
    adapter = None if run.model.lora is None else run.model.lora.start
    if adapter is not None and not adapter.is_dir():
        raise UserError(f"no such folder: model.lora.start={adapter}", "check the path")
    for name in ("initial_load_path", "optimizer_load_path"):
        origin = getattr(run.checkpoint, name)
        if origin is not None and not origin.is_dir():
            raise UserError(f"no such folder: checkpoint.{name}={origin}", "check the path")


def check_reference(run: Run) -> None:
    """Refuse another kind of run's weights for DPO: it would be held against the model's source."""
    origin = run.checkpoint.initial_load_path
    if origin is None or run.task.name != "preference" or run.task.loss != "dpo":
        return
    settings = run_dir.settings_file(origin.parent.parent)
    if settings.is_file() and load_run(settings).task.name != "preference":
        raise UserError(
            f"checkpoint.initial_load_path={origin} is of a run that compared no answers: the "
            f"reference of DPO would be model.source={run.model.source}",
            f"begin with what that run exported: model.source={run_dir.export(settings.parent)}",
        )


def _waits_for_another(run: Run) -> bool:
    """Whether its job comes behind another one, which may make what it begins with."""
    words = run.facility.submit
    return words.get("dependency") is not None or "depend=" in str(words.get("W", ""))


def check_data(run: Run) -> None:
    """Refuse text files that are not there before a job waits for them, or holds none.

    Where their tokens are made already, the text may have been put away.
    """
    if run.folders.bundle is not None or (run_dir.prepared(run) / "manifest.json").is_file():
        return
    words = run.tokenizer.path
    is_made = words is None or not words.startswith("/") or _waits_for_another(run)
    if not is_made and not os.path.exists(str(words)):
        raise UserError(f"no such folder: tokenizer.path={words}", "check the path")
    for data in run.data.each:
        setting = f"source {data.name}: files" if run.data.sources else "data.files"
        _check_text(data, setting)


def _check_text(data: Data, files: str) -> None:
    """files: what the setting of its files is called."""
    if data.source == "hub":
        return
    if data.source == "python_stdlib":
        if named := next((entry for entry in data.files if Path(entry).is_file()), None):
            raise UserError(
                f"{files} names {named}, and data={data.name} reads Python's own sources",
                f"for text of your own: data=text_files data.files={named}",
            )
        return
    for setting, entries in (
        (files, data.files),
        (files.replace("files", "validation.files"), data.validation.files),
    ):
        if entries:
            paths = [path for entry in entries for _, path in named_files(entry, setting)]
            refuse_no_text(paths, setting)


def check_hub(run: Run, environment: Mapping[str, str]) -> None:
    """Refuse what has a name of the hub where nodes without a network would look for it in vain."""
    if run.facility.node_network is not False or run.facility.scheduler == "none":
        return
    for each in hub_names(run):
        if not is_cached(each, run, environment):
            raise UserError(
                f"{each.setting}={each.name} is not in {hub_cache(run, environment)}, and nodes of "
                f"{run.facility.name} have no network to fetch it",
                "where there is one: atoll prepare --into BUNDLE and the words of this line; "
                "then folders.bundle=BUNDLE here",
            )


def check_environment(run: Run) -> None:
    """Refuse a job in an environment that is a login node's side alone."""
    if run.image.file is None and find_spec("torch") is None:
        raise UserError(
            f"{sys.executable} has no torch: it composes and submits, and cannot train",
            "choose an image, as image=cpu, or install the rest: make setup (a wheel: pip install "
            "'WHEEL[train]')",
        )
