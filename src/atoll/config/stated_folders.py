"""Folders that your own settings name, for commands that take no settings, as `atoll status`."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from atoll.config.paths import absolute, clone_around
from atoll.config.working_folder import OWN, source_folder
from atoll.errors import UserError
from atoll.settings.check import SAFE_LOADER


def own_place(name: str) -> Path:
    """The folder of that name in the clone that this folder is in, else here."""
    clone = clone_around(Path.cwd())
    return Path(name) if clone in (None, Path.cwd()) else clone / name


def stated_folder(name: str) -> Path:
    """`folders.NAME` of hydra_conf/local/default.yaml, else the clone's own place of that name.

    Raises `UserError` where the file cannot be read, or names a variable that is not set.
    """
    file = source_folder() / OWN / "default.yaml"
    text = file.read_text() if file.is_file() else ""
    if f"{name}:" not in text:
        return own_place(name)
    try:
        values = OmegaConf.create(yaml.load(text, Loader=SAFE_LOADER) or {})
        stated: Any = OmegaConf.select(values, f"folders.{name}")
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        lines = str(error).strip().splitlines()
        raise UserError(f"folders.{name} of {file}: {lines[0]}", "mend it there") from None
    if stated is None:
        return own_place(name)
    return Path(absolute(str(stated), clone_around(Path.cwd()) or Path.cwd()))
