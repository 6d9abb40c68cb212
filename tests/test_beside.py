"""Two pytests at once are one to whoever waits for them."""

import subprocess
import sys
from pathlib import Path

import pytest
from beside import exit_code

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(0, 0, 0), (0, 5, 0), (5, 0, 0), (5, 5, 5), (1, 0, 1), (0, 1, 1), (0, -9, -9), (2, 5, 2)],
)
def test_who_fails_is_heard(first, second, code):
    assert exit_code(first, second) == code


def test_words_choose_among_both(tmp_path):
    for folder in ("", "testbed/"):
        file = tmp_path / f"tests/{folder}test_{folder[:4]}_it.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("def test_first(): pass\ndef test_second(): assert False\n")

    def run(*words: str) -> tuple[int, str]:
        line = [sys.executable, TESTS / "beside.py", "-p", "no:cacheprovider", *words]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, output = run("-k", "first")
    assert code == 0 and output.count("1 passed") == 2
    code, output = run()
    assert code == 1 and output.count("1 failed, 1 passed") == 2
    code, output = run("tests/testbed/test_test_it.py::test_first")
    assert code == 0 and output.count("1 passed") == 1
