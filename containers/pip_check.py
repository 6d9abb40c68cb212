"""Of the lines that `pip check` has new, those that our packages have a part in.

    pip_check.py BEFORE LOCK < AFTER

A vendor's base comes with packages of its own that ask for other versions than the lock has: that
is the base's to bear, as long as our packages, and torch, have what they ask for.
"""

import re
import sys
from pathlib import Path

# their requirements are ours to keep, although the base brings them
PROTECTED = {"torch", "triton", "numpy", "atoll"}


def ours(before: str, lock: str, after: str) -> list[str]:
    """The new lines about a package of the lock, of ours or of torch."""
    names = {normal(name) for name in re.findall(r"^([A-Za-z0-9][\w.-]*)==", lock, re.M)}
    new = set(after.splitlines()) - set(before.splitlines())
    return sorted(line for line in new if normal(line.split(" ")[0]) in names | PROTECTED)


def normal(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    before, lock = (Path(name).read_text() for name in sys.argv[1:])
    print("\n".join(ours(before, lock, sys.stdin.read())))
