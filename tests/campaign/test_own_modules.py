"""What lies in the folder that a command is typed in is never taken for a module of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.campaign import transfer

ROOT = Path(__file__).parents[2]
FOREIGN = 'from pathlib import Path\nPath("ran").touch()\n'


@pytest.fixture
def foreign_folder(tmp_path: Path) -> Path:
    """An archive of somebody's, with modules of the names that we import."""
    (tmp_path / "atoll").mkdir()
    for name in ("atoll/__init__.py", "atoll/__main__.py", "yaml.py", "argparse.py", "pydantic.py"):
        (tmp_path / name).write_text(FOREIGN)
    return tmp_path


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_another_atoll_is_started_from_where_this_one_is(
    version: tuple[int, int], foreign_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    done = subprocess.run(
        [*transfer.atoll_here(), "models"], cwd=foreign_folder, capture_output=True, text=True
    )
    assert not (foreign_folder / "ran").exists()
    assert done.returncode == 0 and "llama" in done.stdout, done.stderr


@pytest.mark.login_node
def test_the_clone_s_atoll_takes_its_environment_s_modules(
    foreign_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clone = tmp_path_factory.mktemp("clone")
    for folder, path in (("sbatch", ROOT / "sbatch"), ("src", ROOT / "src")):
        (clone / folder).symlink_to(path)
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name in ("pyvenv.cfg", "lib"):
        (clone / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (clone / "batch").mkdir()
    (clone / "batch" / "atoll").write_bytes((ROOT / "sbatch" / "atoll").read_bytes())
    argv = ["bash", clone / "batch" / "atoll", "models"]
    done = subprocess.run(argv, cwd=foreign_folder, env=os.environ, capture_output=True, text=True)
    assert not (foreign_folder / "ran").exists()
    assert done.returncode == 0 and "llama" in done.stdout, done.stderr
