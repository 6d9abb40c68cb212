"""Run pytest on groups of tests, two at a time: much of a test waits, for a job or for ranks.

python tests/beside.py [WORDS for pytest]; with a path among them pytest runs once.
"""

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

# what takes longest first; whatever is in no group comes last
GROUPS = (
    ("tests/train", "tests/sharding"),
    ("tests/cluster", "tests/launch", "tests/health", "tests/data"),
    ("tests/campaign", "tests/benchmarks"),
    ("tests/testbed",),
    ("tests/models", "tests/monitor", "tests/report", "tests/verify"),
)
NOTHING_COLLECTED = 5


def main(words: Sequence[str]) -> int:
    """One lane's output is seen while it runs, the other's behind it; the code is the worst."""
    pytest = [sys.executable, "-m", "pytest"]
    if any(Path(word.partition("::")[0]).exists() for word in words):
        return subprocess.run([*pytest, *words]).returncode
    left = deque([*pytest, *paths, *words] for paths in all_groups())
    with tempfile.TemporaryFile() as output, ThreadPoolExecutor(1) as lane:
        beside = lane.submit(run_in_turn, left, output)
        try:
            codes = run_in_turn(left, None)
        finally:
            left.clear()  # whoever is interrupted begins no other group
            others = beside.result()
            output.seek(0)
            print("\nbeside them:", flush=True)
            sys.stdout.buffer.write(output.read())
    return exit_code([*codes, *others])


def all_groups() -> list[list[str]]:
    """Paths for each run of pytest, and a cache of its own."""
    rest = ["tests", *(f"--ignore={path}" for group in GROUPS for path in group)]
    return [
        [*group, "-o", f"cache_dir=.pytest_cache/{number}"]
        for number, group in enumerate([*GROUPS, rest])
    ]


def run_in_turn(left: deque[list[str]], output: IO[bytes] | None) -> list[int]:
    """Run one after the other until none is left, while another lane does so; their exit codes."""
    codes = []
    while True:
        try:
            argv = left.popleft()
        except IndexError:
            return codes
        codes.append(subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT).returncode)


def exit_code(codes: Sequence[int]) -> int:
    """The worst; words that choose tests may leave groups without any."""
    found = [code for code in codes if code != NOTHING_COLLECTED]
    return max(found, key=abs, default=NOTHING_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
