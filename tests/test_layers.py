"""The rooms of the house: who may import whom, and what no source file may hold."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "atoll"
SOURCES = sorted(PACKAGE.rglob("*.py"))

BASE = {"settings", "errors", "run_dir", "commands", "imports", "one_writer"}
# room -> the rooms it may import, beside itself
ROOMS = {
    "__init__": set(),
    "__main__": {"errors", "commands", "examples", "imports"},
    "errors": set(),
    "one_writer": set(),
    "examples": set(),
    "imports": set(),
    "commands": {"errors", "examples"},
    "tables": set(),
    "settings": {"errors"},
    "run_dir": {"errors", "settings"},
    "plan": {"errors", "settings"},
    "proof": BASE,
    "verify": BASE | {"proof", "campaign", "cluster"},
    "config": BASE | {"plan"},
    "images": BASE | {"config"},
    "cluster": BASE | {"config", "images", "plan", "proof", "tables", "health"},
    "campaign": BASE | {"config", "cluster", "proof"},
    "report": BASE | {"config", "cluster", "campaign", "plan", "proof", "tables", "health"},
    "rehearse": BASE | {"config", "cluster", "launch", "tables"},
    "launch": {"errors", "commands", "imports"},
    "data": BASE,
    "models": BASE | {"data", "proof"},
    "sharding": BASE | {"launch", "data", "models"},
    "health": BASE | {"launch", "data", "models", "sharding"},
    "monitor": BASE | {"launch", "plan", "data", "models", "sharding", "health"},
    "train": BASE | {"launch", "plan", "data", "models", "sharding", "health", "monitor", "proof"},
    "federation": BASE | {"proof"},
}
# room -> the packages it may import, beside the standard library; other rooms: all but HOST_ONLY
PACKAGES = {
    "__init__": set(),
    "__main__": set(),
    "errors": set(),
    "one_writer": set(),
    "examples": set(),
    "imports": set(),
    "commands": set(),
    "tables": {"rich"},
    "settings": {"pydantic", "yaml"},
    "run_dir": {"yaml"},
    "config": {"hydra", "omegaconf", "yaml"},
    "images": {"rich", "spython"},
    "cluster": {"rich", "yaml"},
    "campaign": {"rich", "pydantic", "yaml"},
    "rehearse": set(),
    "report": {"rich"},
    "launch": set(),
    "plan": set(),
    "proof": set(),
    "verify": set(),
}
HOST_ONLY = {"hydra", "omegaconf", "spython"}
LONGEST_FUNCTION = 60
VAGUE_NAMES = {"utils", "util", "helpers", "misc", "common", "core", "manager", "base"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in the file it does."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check():
    rooms = {room_of(path) for path in SOURCES}
    assert rooms >= {
        "config",
        "cluster",
        "campaign",
        "launch",
        "data",
        "models",
        "sharding",
        "train",
        "settings",
    }
    assert rooms <= set(ROOMS)


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_a_room_imports_only_the_rooms_below_it(path):
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("atoll.")}
    assert rooms - {room_of(path)} <= ROOMS[room_of(path)]


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_a_room_imports_only_its_packages(path):
    packages = {name.split(".")[0] for name in imported(path)} - {"atoll"}
    foreign = packages - set(sys.stdlib_module_names)
    if room_of(path) in PACKAGES:
        assert foreign <= PACKAGES[room_of(path)]
    else:
        assert not foreign & HOST_ONLY


def test_one_module_imports_hydra():
    users = [label(path) for path in SOURCES if any("hydra" in name for name in imported(path))]
    assert users == ["src/atoll/config/compose.py"]


def test_no_facility_is_named_in_the_code():
    names = {path.stem for path in (ROOT / "hydra_conf" / "facility").glob("*.yaml")}
    assert "laptop" in names
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(names))})(?![a-z0-9])", re.IGNORECASE)
    named = {path: set(pattern.findall(path.read_text())) for path in SOURCES}
    # where a rehearsal takes place is called the testbed, whatever facility it is of
    for path in (PACKAGE / "rehearse").glob("*.py"):
        named[path] -= {"testbed"}
    assert {label(path): found for path, found in named.items() if found} == {}


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_functions_fit_on_a_page(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions)
    }
    assert {name for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == set()


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_a_file_is_named_after_its_idea(path):
    assert (
        not {part.lower() for part in path.relative_to(PACKAGE).with_suffix("").parts} & VAGUE_NAMES
    )


def test_no_path_of_one_machine_is_written_down():
    home = re.compile(r"/(home|root|Users)/\w")
    parts = ["src", "hydra_conf", "sbatch", "tests", "benchmarks", "docs"]
    files = [
        path
        for part in parts
        for path in (ROOT / part).rglob("*")
        if path.suffix in {".py", ".yaml", ".md", ".sh", ".sbatch", ".def", ".args"}
        and "local" not in path.parent.name
        and path != Path(__file__)
    ]
    assert len(files) > len(SOURCES)
    assert [label(path) for path in files if home.search(path.read_text())] == []


def test_no_two_test_files_share_a_name():
    # pytest imports them by it; the second one would end the whole run
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
