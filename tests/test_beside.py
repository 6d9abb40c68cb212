"""Pytest in several turns is one to whoever waits for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from beside import GROUPS, all_groups, exit_code

TESTS = Path(__file__).parent
# of packages that are here: they take seconds to load, and these tests need none of them
PLAIN = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0, 0), 0),
        ((0, 5), 0),
        ((5, 0), 0),
        ((5, 5, 5), 5),
        ((1, 0), 1),
        ((0, 1, 0), 1),
        ((0, -9), -9),
        ((2, 5), 2),
    ],
)
def test_who_fails_is_heard(codes, code):
    assert exit_code(codes) == code


def test_every_group_is_of_folders_that_are_there():
    assert all((TESTS.parent / path).is_dir() for group in GROUPS for path in group)


def test_every_test_is_in_one_group(tmp_path):
    every = [*(path for group in GROUPS for path in group), "tests", "tests/added"]
    for path in every:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        name = path.replace("/", "_")
        (tmp_path / path / f"test_{name}.py").write_text(f"def test_{name}(): pass\n")
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    found = ""
    for group in all_groups():
        found += subprocess.run(
            [*line, *group], cwd=tmp_path, env=PLAIN, capture_output=True, text=True
        ).stdout
    names = [line.partition("::")[2] for line in found.splitlines() if "::" in line]
    assert sorted(names) == sorted(f"test_{path.replace('/', '_')}" for path in every)


def test_words_choose_among_all(tmp_path):
    for folder in [*(path for group in GROUPS for path in group), "tests"]:
        file = tmp_path / folder / f"test_{folder.replace('/', '_')}_it.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def test_first(): pass\ndef test_second(): assert False\n")
    folders = len(all_groups())

    def run(*words: str) -> tuple[int, str]:
        line = [sys.executable, TESTS / "beside.py", "-p", "no:cacheprovider", *words]
        done = subprocess.run(line, cwd=tmp_path, env=PLAIN, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, output = run("-k", "first")
    assert code == 0 and output.count(" passed") == folders and "failed" not in output
    code, output = run()
    assert code == 1 and output.count(" failed, ") == folders
    code, output = run("tests/testbed/test_tests_testbed_it.py::test_first")
    assert code == 0 and output.count("1 passed") == 1


def test_an_interrupt_ends_both_lanes_and_begins_no_other_group(tmp_path):
    code = "import pathlib, time\ndef test_it():\n    "
    code += "pathlib.Path(__file__ + '.began').touch(); time.sleep(90)\n"
    for folder in [*(path for group in GROUPS for path in group), "tests"]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"test_{folder.replace('/', '_')}_it.py").write_text(code)
    line = [sys.executable, TESTS / "beside.py", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        line, cwd=tmp_path, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    while len(list(tmp_path.rglob("*.began"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode != 0 and output.count("KeyboardInterrupt") >= 2
    assert len(list(tmp_path.rglob("*.began"))) == 2
