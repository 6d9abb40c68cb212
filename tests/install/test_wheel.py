"""A wheel installed where there is no clone: all that a clone has beside src is inside it."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.config import working_folder
from atoll.images.recipe import source_digest

ROOT = Path(__file__).parents[2]
SLURM = ("facility=leonardo", "facility.account=mine", "image=none", "nodes=2")


def run(*argv: object, cwd: Path, code: int = 0) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in argv]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment that has the wheel, and this one's packages beside it."""
    home = tmp_path_factory.mktemp("wheel")
    clone = home / "clone"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in ("containers", "docs", "hydra_conf", "sbatch", "setup", "src"):
        shutil.copytree(ROOT / part, clone / part, ignore=skip)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, clone)
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    run(sys.executable, "-c", build, cwd=clone)
    shutil.rmtree(clone)
    venv.create(home / "env", symlinks=True)
    [packages] = (home / "env").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    [wheel] = home.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", home / "env", "install", "--quiet"]
    run(*install, "--no-deps", "--no-index", "--no-compile", wheel, cwd=home)
    return home


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    run(home / "env" / "bin" / "atoll", "init", "größe 1", cwd=home)
    return home / "größe 1"


def atoll(home: Path, *words: str, cwd: Path | None = None, code: int = 0) -> str:
    return run(home / "env" / "bin" / "atoll", *words, cwd=cwd or home, code=code)


def test_it_composes_and_submits_without_a_clone(home: Path) -> None:
    printed = atoll(home, "submit", "--dry-run", *SLURM)
    batch_file = next((home / "env").rglob("working_folder/sbatch/train.sbatch"))
    assert printed.startswith("sbatch ") and str(batch_file) in printed
    assert os.access(batch_file, os.X_OK) and os.access(batch_file.with_name("atoll"), os.X_OK)
    assert "leonardo" in atoll(home, "list", "facilities")


def test_a_working_folder_queues_by_its_own_batch_file(home: Path, folder: Path) -> None:
    batch_file = folder / "sbatch" / "train.sbatch"
    printed = run(batch_file, "--dry-run", *SLURM, cwd=folder)
    assert str(batch_file) in printed
    assert f"{folder}/runs/" in run(batch_file, "--dry-run", *SLURM, cwd=home), "wherever typed"
    assert atoll(home, "submit", "--dry-run", *SLURM, cwd=folder) == printed
    assert "make demo" in run("make", cwd=folder)


def test_own_settings_and_own_facilities_of_the_folder_count(home: Path, folder: Path) -> None:
    local = folder / "hydra_conf" / "local" / "default.yaml"
    before = local.read_text()
    local.write_text("# @package _global_\nfacility: {account: from_my_own_file}\n")
    facilities = folder / "hydra_conf" / "facility"
    shutil.copy(facilities / "leonardo.yaml", facilities / "mine.yaml")
    words = ["--dry-run", "facility=mine", "image=none"]
    assert "--account=from_my_own_file" in atoll(home, "submit", *words, cwd=folder)
    atoll(home, "init", str(folder), code=2)
    with_older_file(folder, "hydra_conf/facility/leonardo.yaml")
    lumi, newest = facilities / "lumi.yaml", (facilities / "lumi.yaml").read_text()
    lumi.write_text(changed := newest.replace("gpus-per-node: 8", "gpus-per-node: 7"))
    assert changed != newest
    said = atoll(home, "init", "--update", ".", cwd=folder)
    assert "from_my_own_file" in local.read_text() and (facilities / "mine.yaml").is_file()
    assert "older" not in (facilities / "leonardo.yaml").read_text()
    assert f"{lumi}: kept as you changed it" in said and said.count("kept") == 1
    assert lumi.read_text() == changed
    assert lumi.with_name("lumi.yaml.new").read_text() == newest
    assert "lumi.yaml.new" in atoll(home, "init", "--update", ".", cwd=folder), "as long as it is"
    lumi.write_text(newest)
    assert "kept" not in atoll(home, "init", "--update", ".", cwd=folder)
    local.write_text(before)


def with_older_file(folder: Path, name: str) -> None:
    """As an earlier version wrote it, and its user left it."""
    (folder / name).write_text("of an older version")
    record = folder / ".atoll-init.json"
    older = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()}
    record.write_text(json.dumps(json.loads(record.read_text()) | older))


def test_an_update_makes_no_folder_inside_the_one_that_is_meant(home: Path, folder: Path) -> None:
    said = atoll(home, "init", "--update", folder.name, cwd=folder, code=2)
    assert "is no working folder that could be updated" in said and len(said.splitlines()) == 2
    assert not (folder / folder.name).exists()


def test_a_wheel_that_pip_installed_for_its_user_alone_is_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a module's Python, whose own packages nobody may write."""
    [packages] = (home / "env").glob("lib/python*/site-packages")
    own = tmp_path / ".local" / packages.relative_to(home / "env")
    shutil.copytree(packages, own, ignore=shutil.ignore_patterns("pip", "setuptools"))
    monkeypatch.setenv("HOME", str(tmp_path))
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    run(python, "-m", "atoll", "init", "mine", cwd=tmp_path)
    typed = [tmp_path / "mine" / "sbatch" / "train.sbatch", "--dry-run", "facility=laptop"]
    assert "atoll launch" in run(*typed, cwd=tmp_path / "mine")
    shutil.rmtree(own / "atoll")
    said = run(*typed, cwd=tmp_path / "mine", code=2)
    assert "No module named 'atoll'" in said and "atoll init --update" in said


def test_an_image_of_the_wheel_is_that_of_the_clone(home: Path) -> None:
    [carried] = (home / "env").glob("lib/python*/site-packages/atoll/working_folder")
    assert source_digest(carried) == source_digest(ROOT)
    assert not list(carried.rglob("default.yaml"))[1:], "a user's own settings stay at home"


def test_a_folder_that_a_quota_cut_short_is_an_updates_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried, folder, write = tmp_path / "carried", tmp_path / "mine", run_dir.write_whole
    for name in ("Makefile", "hydra_conf/run.yaml", "sbatch/atoll"):
        write(carried / name, name)

    def full(path: Path, content: bytes | str) -> None:
        if path.name == "run.yaml":
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
        write(path, content)

    monkeypatch.setattr(working_folder, "CARRIED", carried)
    monkeypatch.setattr(run_dir, "write_whole", full)
    with pytest.raises(OSError, match="quota"):
        working_folder.write_working_folder(folder, False)
    assert (folder / "Makefile").is_file()
    monkeypatch.setattr(run_dir, "write_whole", write)
    assert working_folder.write_working_folder(folder, True) == []
    assert (folder / "hydra_conf" / "run.yaml").is_file()


def test_a_clone_is_a_working_folder_already(tmp_path: Path) -> None:
    printed = run(sys.executable, "-m", "atoll", "init", tmp_path / "x", cwd=tmp_path, code=2)
    assert "clone" in printed and len(printed.splitlines()) == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("torch", "first"), [(None, "list facilities"), ("here", "make demo")])
def test_what_init_says_comes_next_can_be_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    torch: str | None,
    first: str,
) -> None:
    monkeypatch.setattr(working_folder, "write_working_folder", lambda folder, again: [])
    monkeypatch.setattr(working_folder, "find_spec", lambda name: torch)
    assert working_folder.main([str(tmp_path)]) == 0
    assert first in capsys.readouterr().out
