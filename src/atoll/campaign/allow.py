"""What a coordinator may change of the runs at a facility: the facility says so in `site.allow`.

FOLDER/site.allow, else that of the nearest folder above, else ~/.config/atoll/site.allow: the name
of a setting a line, `*` for any part of it; `signing_key=PATH` a key that updates may be signed
with; `default` stands for all but DENIED. The last may list what FOLDER may be, `folder=PATH` a
line. Without a file it is `default`: choices of the clone's own files, and values that name no
command, bind, module, variable, limit, address, or path outside FOLDER; nothing is taken away.
"""

import os
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from atoll.campaign.signing import refuse_locked
from atoll.config.compose import DELETED, settings_of
from atoll.errors import UserError, printable
from atoll.settings import Run

FILE = "site.allow"
DEFAULT = "default"
KEY, FOLDER = "signing_key=", "folder="
MODELS = "incoming"  # all that a coordinator sends goes there
# of a campaign's folder, before its first request: the base of adapters, tokens of another campaign
# of the same text, and what a kill left
MADE_FOR = ("base", "prepared", "tokenizer", MODELS, ".lock", ".streamflow")
CUT_OFF = ".campaign.json."
# Settings that start a program, load code, leave the folder, or send to another machine; what the
# facility says of itself and its limits; and what a person is asked first.
DENIED = (
    "facility.step", "facility.task_binding", "facility.modules", "facility.environment",
    "facility.task_folders", "facility.binds", "facility.node_folder", "facility.network",
    "facility.container", "facility.hosts_file", "facility.ssh_options",
    "facility.address_suffix", "facility.driver",
    "facility.scheduler", "facility.submit", "facility.budget", "facility.limits", "facility.node",
    "facility.unsupported", "restart", "confirm", "local", "image", "folders", "launcher",
    "loggers", "override", "model.source", "model.lora.start", "tokenizer.path",
    "tokenizer.chat_template", "checkpoint.initial_load_path", "checkpoint.optimizer_load_path",
    "evaluation.tasks_folder", "sharding.deepspeed",
)  # fmt: skip
# of transformers' own words numbers alone may be given, and the family: text may name code
FREE_WORDS, FAMILY = "model.config", "model.config.model_type"
OWN = ("local",)  # the facility's choice alone
# flags of sbatch and qsub that choose a queue, and nothing else
QUEUES = ("partition", "qos", "constraint", "reservation", "q")


def refuse_settings(overrides: Sequence[str], folder: Path) -> None:
    """Raise `UserError` for the first setting that this facility does not let a request change."""
    allowed = allowed_at(folder)
    for name, value, is_choice in settings_of(overrides):
        listed = any(fnmatchcase(name, pattern) for pattern in allowed)
        is_theirs = (is_choice and name not in OWN) or not (
            value is DELETED or _denied(name, value) or _leaves(value, folder)
        )
        if not listed and not (DEFAULT in allowed and is_theirs):
            to = "nothing" if value is DELETED else repr(printable(str(value), 80))
            raise UserError(
                f"this facility does not let a request change {printable(name, 80)} to {to}",
                _by_a_line(name, folder),
            )


def refuse_outside(run: Run, overrides: Sequence[str], folder: Path) -> None:
    """Files of a request that are not the clone's own choice lie in the folder, or are listed.

    With a bundle they are the names of where it was made, and nobody reads them here.
    """
    if run.folders.bundle is not None:
        return
    named = {name for name, _, is_choice in settings_of(overrides) if not is_choice}
    allowed = allowed_at(folder)
    data = run.data
    of_sources = [
        path
        for own in (data.each if data.sources else [])
        for path in (
            *(own.files if own.source == "files" else ()),
            *own.validation.files,
            *folder_here(own.hub),
        )
    ]
    files = {
        "data.files": data.files if data.source == "files" else [],
        "data.validation.files": data.validation.files,
        "data.sources": of_sources,
        "data.hub": folder_here(data.hub),
    }
    for name, paths in files.items():
        listed = any(fnmatchcase(name, pattern) for pattern in allowed)
        if any(name == one or name.startswith(f"{one}.") for one in named) and not listed:
            for path in paths:
                _refuse_path(name, Path(path), folder)


def refuse_folder(folder: Path) -> None:
    """The coordinator names the folder: not one that holds more than a campaign.

    Where the facility lists folders (`folder=PATH` in its own file), one of them or below.
    """
    place, home = folder.expanduser().resolve(), Path.home().resolve()
    listed = [line.removeprefix(FOLDER) for line in _lines(_own_file()) if line.startswith(FOLDER)]
    within = [_place(one) for one in listed]
    if within and not any(one == place or one in place.parents for one in within):
        raise UserError(
            f"this facility does not let a campaign have the folder {printable(str(place), 300)}",
            f"whoever owns it may: a line '{FOLDER}{place}' in {_own_file()}",
        )
    if (MODELS in folder.parts or MODELS in place.parts) and place not in within:
        raise UserError(
            f"{printable(str(folder), 300)} lies in a folder {MODELS}/, where models come to: what "
            "came could say what requests may",
            "give the facility a folder of its own, as folder: atoll/NAME; or whoever owns it "
            f"lists it: a line '{FOLDER}{printable(str(place), 300)}' in {_own_file()}",
        )
    above = place == home or place in home.parents
    is_hidden = home in place.parents and place.relative_to(home).parts[0].startswith(".")
    is_within = any((parent / "campaign.json").is_file() for parent in place.parents)
    if (above or is_hidden or is_within or (place / ".ssh").exists()) and place not in within:
        raise UserError(
            f"{printable(str(place), 300)} holds more than a campaign: all of it would be open to "
            "requests",
            "give the facility a folder of its own, as folder: atoll/NAME; or whoever owns it "
            f"lists it: a line '{FOLDER}{printable(str(place), 300)}' in {_own_file()}",
        )
    if (more := _before_any_campaign(place)) and place not in within:
        raise UserError(
            f"{printable(str(place), 300)} holds {printable(more, 80)} and no campaign yet: all of "
            "it would be open to requests",
            "give the facility a new folder, as folder: atoll/NAME; or whoever owns it says there "
            f"what requests may: a line {DEFAULT!r} in {place / FILE}",
        )


def _before_any_campaign(place: Path) -> str:
    """What lies in a folder that is no campaign's, and that nobody made for one; empty: nothing."""
    if not place.is_dir() or any((place / name).is_file() for name in ("campaign.json", FILE)):
        return ""
    names = sorted(path.name for path in place.iterdir())
    others = (name for name in names if name not in MADE_FOR and not name.startswith(CUT_OFF))
    return next(others, "")


def refuse_key(key: str | None, folder: Path) -> None:
    """A request signs with a key in the folder, or with one that the facility itself names."""
    if key is None:
        return
    path = _place(key)
    named = [line.removeprefix(KEY) for line in allowed_at(folder) if line.startswith(KEY)]
    if folder.resolve() not in path.parents and path not in map(_place, named):
        shown = printable(key, 300)
        raise UserError(
            f"this facility does not let a request sign with {shown!r}",
            _by_a_line(f"{KEY}{shown}", folder),
        )
    if not path.is_file():  # else that is found when the round has been trained
        how = shlex.join(["ssh-keygen", "-t", "ed25519", "-N", "", "-f", str(path)])
        if folder.resolve() in path.parents:
            made = shlex.join(["mkdir", "-p", str(path.parent)])
            how = f"{made}; {how}; and a line {DEFAULT!r} in {folder / FILE}"
        shown = printable(key, 300)
        raise UserError(f"no key {shown} here to sign with", f"make it: {printable(how, 500)}")
    refuse_locked(path)


def folder_here(name: str | None) -> list[str]:
    """What is read in place of a dataset of the hub, where a folder has its name."""
    return [name] if name is not None and Path(name).exists() else []


def allowed_at(folder: Path) -> list[str]:
    """The lines of the facility's own list."""
    path = _list_of(folder)
    return [DEFAULT] if path is None else _lines(path)


def _list_of(folder: Path) -> Path | None:
    """The nearest: no other is read."""
    above = [place / FILE for place in (folder, *folder.parents)]  # a folder in a listed one, too
    return next((path for path in (*above, _own_file()) if path.is_file()), None)


def _by_a_line(line: str, folder: Path) -> str:
    """How the owner allows something: in the list that counts, or in the first one."""
    path = _list_of(folder)
    where = f"{folder / FILE}, with {DEFAULT!r}" if path is None else str(path)
    return f"whoever owns it may: a line '{line}' in {where}"


def _own_file() -> Path:
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return settings / "atoll" / FILE


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def _place(key: str) -> Path:
    return Path(key).expanduser().resolve()


def _refuse_path(name: str, path: Path, folder: Path) -> None:
    if folder.resolve() not in path.resolve().parents:
        raise UserError(
            f"this facility does not let a request name {printable(str(path), 80)!r} ({name}), "
            f"which is outside {folder}",
            _by_a_line(name, folder),
        )


def _denied(name: str, value: Any) -> bool:
    """Whether a setting is one of those, or a group that holds one of them."""
    if name.startswith("facility.submit."):
        return name.removeprefix("facility.submit.") not in QUEUES
    if name == FREE_WORDS or name.startswith(f"{FREE_WORDS}."):
        return name != FAMILY and _has_text(value)
    return name.startswith("hydra") or any(
        name == denied or name.startswith(f"{denied}.") or denied.startswith(f"{name}.")
        for denied in DENIED
    )


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_text(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_has_text(part) for part in value)
    return isinstance(value, str)


def _leaves(value: Any, folder: Path) -> bool:
    """Whether a value names a place outside the folder, an address, or the environment."""
    if isinstance(value, dict):
        return any(_leaves(part, folder) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return any(_leaves(part, folder) for part in value)
    text = str(value)
    if "${" in text or "://" in text or ".." in Path(text).parts or text.startswith("~"):
        return True
    return text.startswith("/") and folder not in Path(text).parents
