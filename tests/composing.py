"""Fixtures: the configuration tree without this machine's own hydra_conf/local/default.yaml."""

import shutil
from pathlib import Path

import pytest

from atoll.config import stated_folders
from atoll.config.compose import compose
from atoll.config.paths import CACHES

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to type commands in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stated_folders, "source_folder", lambda: folder)
    return folder


@pytest.fixture
def tree(tmp_path):
    source, mine = ROOT / "hydra_conf", tmp_path / "hydra_conf"
    shutil.copytree(source, mine, ignore=shutil.ignore_patterns("local"))
    return mine


@pytest.fixture
def composed(tree):
    """Compose the run of these overrides."""
    return lambda *overrides: compose(overrides, tree)
