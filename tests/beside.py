"""Run pytest twice at once: the tests of the testbed, which mostly wait, beside the others.

python tests/beside.py [WORDS for pytest]; with a path among them pytest runs once.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTBED = "tests/testbed"
NOTHING_COLLECTED = 5


def main(words: Sequence[str]) -> int:
    """Print the testbed's output behind that of the others; the exit code is of who failed."""
    pytest = [sys.executable, "-m", "pytest"]
    if any(Path(word.partition("::")[0]).exists() for word in words):
        return subprocess.run([*pytest, *words]).returncode
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(
            [*pytest, TESTBED, "-o", f"cache_dir=.pytest_cache/{TESTBED}", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            first = subprocess.run([*pytest, f"--ignore={TESTBED}", *words]).returncode
        finally:
            second = beside.wait()
            output.seek(0)
            print(f"\n{TESTBED}, beside them:", flush=True)
            sys.stdout.buffer.write(output.read())
    return exit_code(first, second)


def exit_code(first: int, second: int) -> int:
    """Words that choose tests may leave one of the two without any."""
    codes = [code for code in (first, second) if code != NOTHING_COLLECTED]
    return max(codes, key=abs, default=NOTHING_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
