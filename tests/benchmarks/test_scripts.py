"""The benchmarks' scripts: what they import of us is there, and those with options say which."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.matrix
@pytest.mark.parametrize("path", WITH_OPTIONS, ids=stem)
def test_a_benchmark_lists_its_options(path):
    shown = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: ")


def _of_us(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "atoll"
