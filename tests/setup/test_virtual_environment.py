"""Set-up on a machine where something is missing: two lines, and nothing of the user's is lost."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "setup" / "virtual_environment.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("virtual_environment", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_command(folder: Path, name: str, shell: str) -> None:
    command = folder / name
    command.write_text(f"#!/bin/sh\n{shell}\n")
    command.chmod(0o755)


def test_a_folder_that_is_no_environment_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit) as stopped:
        script.main(tmp_path)
    assert str(stopped.value).splitlines() == [
        f"{tmp_path} exists and is no virtual environment.",
        "Move it away, then try again.",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_without_ensurepip_and_apt_get_the_python_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        script.install_pip_of_debian(tmp_path / "environment")
    found, hint = str(stopped.value).splitlines()
    assert found.startswith(f"{sys.executable} has no ensurepip")
    assert "PYTHON=" in hint


def test_the_reason_of_apt_get_is_shown(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_command(tmp_path, "apt-get", "echo noise >&2; echo 'E: no such mirror' >&2; exit 100")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit) as stopped:
        script.download_debian_package("python3-pip-whl", tmp_path)
    found, hint = str(stopped.value).splitlines()
    assert found.endswith("cannot download python3-pip-whl: E: no such mirror")
    assert "apt install python3-venv" in hint


def test_fresh_package_lists_are_fetched_where_the_machine_has_none(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, folder = tmp_path / "bin", tmp_path / "downloads"
    commands.mkdir()
    folder.mkdir()
    # Knows a package only after an update into lists of our own, as apt-get does.
    add_command(
        commands,
        "apt-get",
        'case "$*" in\n'
        '*"Dir::State=$PWD/apt "*update) touch updated ;;\n'
        '*"Dir::State=$PWD/apt "*"download pip") test -e updated && touch pip_1_all.deb ;;\n'
        "*) exit 100 ;;\nesac",
    )
    add_command(commands, "dpkg-deb", 'touch "$3/unpacked"')
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    script.download_debian_package("pip", folder)
    assert (folder / "unpacked").exists()
