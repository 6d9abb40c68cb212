"""What makes a run the run it is: its derived name, and what may not change when it resumes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.config.provenance import leaves
from atoll.errors import UserError
from atoll.settings import Image, Run, dumped, load_run

# A run that resumes may use other nodes, strategies, cadences and folders; these decide its
# losses, and stay.
FIXED = (
    "seed",
    "model",
    "tokenizer",
    "data",
    "task",
    "optimizer",
    "precision",
    "training.global_batch_samples",
    "training.z_loss",
    "training.data_seed",
    "training.consumed_steps",
    "training.schedule_stride",
    "checkpoint.initial_load_path",
    "checkpoint.optimizer_load_path",
)
FREE = ("data.workers",)
BATCH = "training.global_batch_samples"


NAME_CHARACTERS = 120  # as settings allow
PART_CHARACTERS, WORD_CHARACTERS = 32, 28


def derived_name(run: Run, stated: Mapping[str, Any], typed: Mapping[str, Any]) -> str:
    """A name from the configuration alone, so that the same line submitted again resumes.

    typed: settings that a person changed; they stand in the name as words. stated: what run.yaml
    says. Settings that are as stated there, or at a default of their own, do not count, so that one
    added later renames nothing. Nor do folders, spare nodes, what watches
    the run, checks left out, and all that a facility says of itself but its name: who pays or a
    network variable make no other run, nor what is asked before it is queued.
    """
    values = run.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={
            "name": True,
            "folders": True,
            "facility": True,
            "restart": True,
            "watch": True,
            "spare_nodes": True,
            "monitor": True,
            "override": True,
            "confirm": True,
            "image": set(Image.model_fields) - {"name", "args_file", "run_flags", "device"},
            "data": {"workers"},
        },
    )
    as_stated = dict(leaves(dict(stated)))
    chosen = {name: value for name, value in leaves(values) if as_stated.get(name, ...) != value}
    chosen["facility"] = run.facility.name
    parts = (run.model.name, run.data.name, run.sharding.name)
    digest = run_dir.digest(chosen)
    name = "-".join(part[:PART_CHARACTERS] for part in parts)
    for word in sorted(_word(setting, typed[setting]) for setting in typed if setting in chosen):
        if word and len(name) + len(word) + len(digest) + 2 <= NAME_CHARACTERS:
            name = f"{name}-{word}"
    return f"{name}-{digest}"


def _word(setting: str, value: Any) -> str:
    """A setting and its value as a part of a name: `learning_rate0.003`; nothing where too long."""
    if not isinstance(value, bool | int | float | str):
        return ""
    text = Path(value).name if isinstance(value, str) else str(value).lower()
    word = f"{setting.rpartition('.')[2]}{text}"
    fits = len(word) <= WORD_CHARACTERS and re.fullmatch(r"[A-Za-z0-9._-]+", word)
    return word if fits else ""


def check_same_run(run: Run, run_folder: Path) -> None:
    """Refuse to resume another run under this run's name."""
    settings_file = run_dir.settings_file(run_folder)
    if not settings_file.exists():
        return
    earlier = load_run(settings_file)
    has_trained = bool(run_dir.complete_checkpoints(run_folder))
    before, now = fixed_values(earlier), fixed_values(run)
    if not has_trained:  # on other nodes there may be none: 8-bit moments do not reshard
        before.pop("checkpoint.optimizer_load_path", None)
        now.pop("checkpoint.optimizer_load_path", None)
    for name in [*now, *(name for name in before if name not in now)]:
        if before.get(name) != now.get(name):
            hint = "give this one another name: name=NAME"
            if name == BATCH and run.training.device_batch_samples is not None:
                same = f"training.device_batch_samples=null {BATCH}={before.get(name)}"
                hint = f"{same} goes on with it; or {hint}"
            raise UserError(
                f"run {run.name} was made with {name}={before.get(name)!r}, "
                f"now it is {now.get(name)!r}",
                hint,
            )
    ranks, scale = (earlier.axes.data, run.axes.data), run.optimizer.scale_with_ranks
    if has_trained and scale != "none" and ranks[0] != ranks[1]:
        raise UserError(
            f"run {run.name} has the learning rate of {ranks[0]} data-parallel ranks "
            f"(optimizer.scale_with_ranks={scale}), now there are {ranks[1]}",
            "go on with as many, or give this one another name: name=NAME",
        )


def fixed_values(run: Run) -> dict[str, Any]:
    """The settings that a run keeps for life, by dotted name."""
    return {
        name: value
        for name, value in leaves(dumped(run))
        if name not in FREE and any(name == part or name.startswith(f"{part}.") for part in FIXED)
    }
