"""One process at a time makes a folder: one that a kill of its parent left behind is waited for."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def one_writer(out: Path) -> Iterator[None]:
    """Wait until nobody else makes `out`; the lock beside it ends with its process."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}.lock")
    while True:
        with open(path, "w") as lock:
            flock(lock, fcntl.LOCK_EX)
            if not _is_there(path, lock.fileno()):  # whoever held it has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def flock(file: IO[Any], how: int) -> None:
    """flock(2), whose errors name the file: some file systems have no locks."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        error.filename = file.name
        raise


def _is_there(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
