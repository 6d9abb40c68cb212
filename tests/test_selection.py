"""Which tests a run takes: four slices are disjoint, and together they are all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import selection

TESTS = """
import pytest

@pytest.mark.matrix(always=lambda a, b: a == b)
@pytest.mark.parametrize("a", range(8))
@pytest.mark.parametrize("b", range(8))
def test_pair(a, b): pass

@pytest.mark.full
def test_long(): pass

def test_short(): pass
"""
ALWAYS = {f"test_pair[{n}-{n}]" for n in range(8)} | {"test_short"}
EVERY = {f"test_pair[{b}-{a}]" for a in range(8) for b in range(8)} | {"test_short", "test_long"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selection")
    (path / "conftest.py").write_text(Path(selection.__file__).read_text())
    (path / "test_made_up.py").write_text(TESTS)
    lines = [f"{name}: one of ours" for name in ("matrix", "full")]
    (path / "pytest.ini").write_text("[pytest]\nmarkers =\n " + "\n ".join(lines) + "\n")
    return path


def collected(folder: Path, *words: str) -> tuple[set[str], str]:
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    # plugins of packages that are here take seconds to load, and nothing here needs them
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*argv, *words], cwd=folder, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
    assert len(names) == len(set(names))
    return set(names), done.stdout


def test_four_slices_are_disjoint_and_cover_all(folder: Path) -> None:
    slices = []
    for number in range(selection.SLICES):
        names, output = collected(folder, f"--slice={number}")
        assert f"slice {number} of 0..3 of the matrix" in output
        assert names >= ALWAYS
        slices.append(names - ALWAYS)
    assert all(not slices[i] & slices[j] for i in range(4) for j in range(i))
    assert set().union(*slices) == EVERY - ALWAYS - {"test_long"}
    assert min(map(len, slices)) > 4, "no slice is nearly empty"


def test_full_takes_all_and_an_id_takes_its_test(folder: Path) -> None:
    assert collected(folder, "--full")[0] == EVERY
    assert collected(folder, "test_made_up.py::test_long")[0] == {"test_long"}


@pytest.mark.parametrize("last", range(8))
def test_the_commit_chooses_the_slice(last: int) -> None:
    assert selection.slice_of_commit(f"{'ab' * 19}1{last}") == last % 4
    assert selection.slice_of_commit("") == 0
