"""One process at a time makes a folder: one that a kill of its parent left behind is waited for."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def one_writer(out: Path) -> Iterator[None]:
    """Wait until nobody else makes `out`; the lock beside it ends with its process."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}.lock")
    while True:
        with open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_there(path, lock.fileno()):  # whoever held it has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_there(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
