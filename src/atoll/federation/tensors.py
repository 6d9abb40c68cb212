"""Safetensors files read and written a stretch at a time, and nothing trusted in their headers.

Legend: N values of one stretch.
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.errors import UserError

# The format's own limit is 100 MB; a model of a thousand layers needs less than 2.
MAX_HEADER_BYTES = 16 << 20
FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$")
TENSOR_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*$")
DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8,
    "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a file, in bytes from the file's begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Reader:
    """The tensors of one file; a stretch is read by its place, the file is never mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)
        try:
            self.file = os.open(path, flags)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}", "send it again") from None
        self.entries = _entries(path, self.file)

    def values(self, name: str, first: int, count: int) -> Tensor:
        """So many values of a tensor, flattened, in its own number format."""
        entry = self.entries[name]
        size = entry.dtype.itemsize
        buffer = bytearray(count * size)
        view, done = memoryview(buffer), 0
        while done < len(buffer):
            got = os.preadv(self.file, [view[done:]], entry.start + first * size + done)
            if got == 0:
                raise UserError(f"{self.path} ends early, at tensor {name}", "send it again")
            done += got
        return torch.frombuffer(buffer, dtype=entry.dtype)

    def close(self) -> None:
        os.close(self.file)


class Writer:
    """A file whose header is written first, and whose tensors may come in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]):
        header, place = dict[str, Any](), 0
        header["__metadata__"] = {"format": "pt"}
        for name, (dtype, shape) in tensors.items():
            size = prod(shape) * dtype.itemsize
            offsets = [place, place + size]
            header[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": offsets,
            }
            place += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        self.path = path
        self.entries = {
            name: Entry(dtype, shape, begin + header[name]["data_offsets"][0])
            for name, (dtype, shape) in tensors.items()
        }
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(self.file, 0, begin + max(place, 1))
        except OSError as error:
            os.close(self.file)
            raise UserError(
                f"{path} needs {begin + place:,} bytes: {error.strerror}",
                "make room there, then type the same line again",
            ) from None
        os.ftruncate(self.file, begin + place)
        self._write(struct.pack("<Q", len(text)) + text, 0)

    def put(self, name: str, first: int, values_N: Tensor) -> None:
        """Write a stretch of a tensor, in the number format of the header."""
        entry = self.entries[name]
        content: Any = values_N.to(entry.dtype).contiguous().view(torch.uint8).numpy()
        self._write(content, entry.start + first * entry.dtype.itemsize)

    def finish(self) -> None:
        """Make the content survive a power cut."""
        os.fsync(self.file)
        os.close(self.file)

    def _write(self, content: Any, place: int) -> None:
        view = memoryview(content).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(self.file, view[done:], place + done)


def open_all(folder: Path, names: list[str]) -> Iterator[Reader]:
    """Readers of plain files of a folder; links and other names are refused."""
    for name in names:
        refuse_name(name, FILE_NAME, f"{folder} names the file")
        yield Reader(folder / name)


def refuse_name(name: str, pattern: re.Pattern[str], where: str) -> None:
    if not pattern.match(name):
        raise UserError(f"{where} {name[:80]!r}", "do not use what comes from there")


def _entries(path: Path, file: int) -> dict[str, Entry]:
    size = os.fstat(file).st_size
    head = os.pread(file, 8, 0)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise UserError(
            f"{path} is no safetensors file: {size:,} bytes, its header claims {length:,}",
            "send it again; if it stays so, do not use what comes from there",
        )
    try:
        header = json.loads(os.pread(file, length, 8))
        header.pop("__metadata__", None)
        found = {name: _entry(about, 8 + length) for name, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} has a header that is not safetensors'", "send it again") from None
    place = 8 + length
    for name, entry in sorted(found.items(), key=lambda item: item[1].start):
        refuse_name(name, TENSOR_NAME, f"{path} names a tensor")
        if entry.start != place:
            raise UserError(f"{path}: tensor {name} overlaps another or a gap", "send it again")
        place += entry.numel * entry.dtype.itemsize
    if place != size:
        raise UserError(f"{path} has {size:,} bytes, its header says {place:,}", "send it again")
    return found


def _entry(about: dict[str, Any], begin: int) -> Entry:
    shape = tuple(int(length) for length in about["shape"])
    start, end = about["data_offsets"]
    entry = Entry(DTYPES[about["dtype"]], shape, begin + int(start))
    if min((0, *shape)) < 0 or end - start != entry.numel * entry.dtype.itemsize:
        raise ValueError("sizes that do not add up")
    return entry
