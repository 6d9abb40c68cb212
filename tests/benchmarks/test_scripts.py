"""The benchmarks' scripts: what they import of us is there, and those with options say which."""

import ast
import importlib
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import IO

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
WITH_OPTIONS = [path for path in SCRIPTS if "ArgumentParser(" in path.read_text()]


def stem(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", SCRIPTS, ids=stem)
def test_what_a_benchmark_imports_of_us_is_there(path):
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if _of_us(node)]
    for node in nodes:
        module = importlib.import_module(node.module)
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")


@pytest.fixture(scope="module")
def loaded():
    """What most of them import, once: a process for each script begins with it."""
    importlib.import_module("torch")
    importlib.import_module("transformers")


@pytest.mark.matrix
@pytest.mark.parametrize("path", WITH_OPTIONS, ids=stem)
def test_a_benchmark_lists_its_options(path, loaded, tmp_path):
    with open(tmp_path / "shown", "w+") as shown:
        child = os.fork()
        if child == 0:
            os._exit(_shows_help(path, shown))
        _, status = os.waitpid(child, 0)
    output = (tmp_path / "shown").read_text()
    assert os.waitstatus_to_exitcode(status) == 0, output
    assert output.startswith("usage: ")


def _shows_help(path: Path, shown: IO[str]) -> int:
    """Its exit code, as of `python PATH --help`."""
    sys.argv, sys.stdout, sys.stderr = [str(path), "--help"], shown, shown
    sys.path = [str(path.parent), *(place for place in sys.path if "tests" not in place)]
    code = 1
    try:
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except Exception:
        traceback.print_exc(file=shown)
    shown.flush()
    return code


def _of_us(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "atoll"
