"""Which tests a run takes.

`pytest` leaves out what is marked `full`, and of what is marked `matrix` it takes a quarter, chosen
by the commit; `pytest --full` takes everything. A test that is named by its id is always taken.
"""

import hashlib
import subprocess
from pathlib import Path

import pytest

SLICES = 4
CHOSEN_SLICE = pytest.StashKey[int]()
LEFT_TO_FULL = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--full", action="store_true", help="every test: as make test-full")
    group.addoption(
        "--slice",
        type=int,
        choices=range(SLICES),
        metavar=f"0..{SLICES - 1}",
        help="the quarter of the matrix to run; unset: by the commit's hash",
    )


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--slice")
    config.stash[CHOSEN_SLICE] = slice_of_commit(commit()) if given is None else given
    config.stash[LEFT_TO_FULL] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full") or any("::" in word for word in config.args):
        return
    chosen = config.stash[CHOSEN_SLICE]
    taken = [item for item in items if is_taken(item, chosen)]
    left = [item for item in items if not is_taken(item, chosen)]
    config.stash[LEFT_TO_FULL] = len(left)
    config.hook.pytest_deselected(items=left)
    items[:] = taken


def pytest_report_header(config: pytest.Config) -> str:
    return described(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    terminalreporter.write_line(described(config))


def described(config: pytest.Config) -> str:
    if config.getoption("--full"):
        return "selection: every test"
    return (
        f"selection: slice {config.stash[CHOSEN_SLICE]} of 0..{SLICES - 1} of the matrix; "
        f"{config.stash[LEFT_TO_FULL]} tests are left to make test-full"
    )


def is_taken(item: pytest.Item, chosen: int) -> bool:
    """Whether a run of one slice has this test."""
    if item.get_closest_marker("full"):
        return False
    matrix = item.get_closest_marker("matrix")
    if matrix is None or slice_of_test(item.nodeid) == chosen:
        return True
    always = matrix.kwargs.get("always")
    return always is not None and bool(always(**item.callspec.params))  # type: ignore[attr-defined]


def slice_of_test(node_id: str) -> int:
    """The one slice that has a test, whichever others are selected."""
    return int(hashlib.sha256(node_id.encode()).hexdigest(), 16) % SLICES


def slice_of_commit(commit_hash: str) -> int:
    return int(commit_hash or "0", 16) % SLICES


def commit() -> str:
    """The hash of the commit that is checked out; empty where there is none, as in an image."""
    argv = ["git", "rev-parse", "--verify", "HEAD"]
    try:
        done = subprocess.run(argv, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
