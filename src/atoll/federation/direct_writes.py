"""Writes around the page cache, where the disk is this machine's own (open(2): O_DIRECT).

Through the cache every 4 KiB is a new page and a copy into it: with a small machine's processors,
more time than the disk needs. The kernel keeps both ways coherent, a page at a time.
"""

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = max(4096, mmap.PAGESIZE)  # of files, sizes and memory, all three
PIECE_BYTES, PIECES = 2 << 20, 3
# over a network, each write would wait for a server's answer
OWN_DISKS = ("ext4", "xfs")
MOUNTS = Path("/proc/self/mountinfo")


class DirectWrites(ExitStack):
    """Writes of open files, one after the other in a thread; closing waits for all of them.

    files: number of an open file -> its path; they are closed after this.
    """

    def __init__(self, files: dict[int, Path]) -> None:
        super().__init__()
        self.errors, self.free = list[Exception](), SimpleQueue[Tensor]()
        with ExitStack() as opened:
            self.direct = {file: _opened(path, opened) for file, path in files.items()}
            self.thread = opened.enter_context(ThreadPoolExecutor(1))
            opened.callback(self.wait)
            self.push(opened.pop_all())
        for _ in range(PIECES):  # mapped memory begins with a page
            memory = mmap.mmap(-1, PIECE_BYTES + BLOCK_BYTES)
            self.free.put(torch.frombuffer(memory, dtype=torch.uint8))

    def write(self, file: int, content_B: Tensor, place: int) -> None:
        """Bytes for this place of a file: copied at once, written later."""
        for part_B in torch.split(content_B, PIECE_BYTES):
            piece_B, begin = self.free.get(), place % BLOCK_BYTES
            piece_B[begin : begin + len(part_B)] = part_B
            self.thread.submit(self._write, file, piece_B, begin, len(part_B), place)
            place += len(part_B)

    def wait(self) -> None:
        """Until all that was given is written; raises what kept it from that."""
        self.thread.submit(int).result()
        if self.errors:
            raise self.errors[0]

    def _write(self, file: int, piece_B: Tensor, begin: int, count: int, place: int) -> None:
        """Whole blocks around the cache; the rest, in blocks that others share, through it."""
        content: Any = piece_B.numpy()
        view, end = memoryview(content), begin + count
        first = min(end, -(-begin // BLOCK_BYTES) * BLOCK_BYTES)
        last = max(first, end // BLOCK_BYTES * BLOCK_BYTES)
        try:
            write_at(file, view[begin:first], place)
            _write_blocks(self.direct[file], file, view[first:last], place - begin + first)
            write_at(file, view[last:end], place - begin + last)
        except Exception as error:  # whoever waits has to know
            self.errors.append(error)
        finally:
            self.free.put(piece_B)


def write_at(file: int, view: memoryview, place: int) -> None:
    """All of it, at this place of an open file."""
    done = 0
    try:
        while done < len(view):
            done += os.pwrite(file, view[done:], place + done)
    except OSError as error:
        raise named(error, file) from None


def sync(file: int) -> None:
    """Make an open file's content survive a power cut."""
    try:
        os.fsync(file)
    except OSError as error:
        raise named(error, file) from None


def named(error: OSError, file: int) -> OSError:
    """The same error, and of which open file it is."""
    error.filename = os.readlink(f"/proc/self/fd/{file}")
    return error


def is_own_disk(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether this folder is on a file system that writes to a disk of this machine."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # proc(5): ID PARENT MAJOR:MINOR ROOT MOUNT OPTIONS [MORE ...] - KIND SOURCE OPTIONS
    lines = [line for line in mounts.read_text().splitlines() if line.split()[2] == number]
    return any(line.partition(" - ")[2].split()[0] in OWN_DISKS for line in lines)


def _opened(path: Path, opened: ExitStack) -> int | None:
    """A file to be written around the cache; none where its file system cannot do it so."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    opened.callback(os.close, file)
    return file


def _write_blocks(direct: int | None, file: int, view: memoryview, place: int) -> None:
    """Whole blocks around the cache, or through it where the file system will not have them so."""
    if direct is not None:
        try:
            return write_at(direct, view, place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    write_at(file, view, place)
