"""Folders that your own settings name, for commands that take no settings, as `atoll status`."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from atoll.config.compose import compose
from atoll.config.paths import absolute, clone_around
from atoll.config.working_folder import OWN, source_folder
from atoll.errors import UserError
from atoll.settings.check import SAFE_LOADER


def own_place(name: str) -> Path:
    """The folder of that name in the clone that this folder is in, else here."""
    start = _start(name)
    return Path(name) if start == Path.cwd() else start / name


def _start(name: str) -> Path:
    """Where a relative folder begins, as where a run is composed."""
    here = Path.cwd()
    of_code = clone_around(Path(__file__)) if name == "images" else None
    return clone_around(here) or of_code or here


def stated_folder(name: str) -> Path:
    """`folders.NAME` of hydra_conf/local/default.yaml, else the clone's own place of that name.

    Raises `UserError` where the file cannot be read, or names a variable that is not set.
    """
    file = source_folder() / OWN / "default.yaml"
    try:
        text = file.read_text() if file.is_file() else ""
        stated = _stated(text, name) if f"{name}:" in text else None
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        lines = str(error).strip().splitlines()
        raise UserError(f"folders.{name} of {file}: {lines[0]}", "mend it there") from None
    if stated is None:
        return own_place(name)
    return Path(absolute(stated, _start(name)))


def _stated(text: str, name: str) -> str | None:
    """By the file alone; where it refers to other settings, by the whole tree."""
    values = OmegaConf.create(yaml.load(text, Loader=SAFE_LOADER) or {})
    try:
        stated: Any = OmegaConf.select(values, f"folders.{name}")
    except InterpolationKeyError:
        stated = getattr(compose([]).run.folders, name)
    return None if stated is None else str(stated)
