"""Safetensors files read and written a stretch at a time, and nothing trusted in their headers.

Legend: N values of one stretch.
"""

import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.errors import UserError
from atoll.federation.direct_writes import DirectWrites, is_own_disk, sync, write_at
from atoll.settings.exchange import STAYS, refuse_name

# The format's own limit is 100 MB; a file with a thousand layers needs less than 2.
MAX_HEADER_BYTES = 4 << 20
# of an update all together: for each tensor of the model, whose name has some 100, and each file
TENSOR_HEADER_BYTES, FILE_HEADER_BYTES = 512, 1024
MAX_DIMENSIONS = 16
MAX_VALUES = 1 << 48
STRETCH = 1 << 19  # values in memory at once, of one tensor: a multiple of every block
TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Layout = dict[str, dict[str, tuple[int, ...]]]  # file name -> tensor -> shape
TypedLayout = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]


@dataclass(frozen=True)
class Stretch:
    """Some values of one tensor, flattened."""

    name: str
    first: int
    count: int


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: an open file, and bytes from its begin."""

    path: Path
    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stays: bool = False  # it is said not to learn

    @property
    def learns(self) -> bool:
        return self.dtype.is_floating_point and not self.stays

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size(self) -> int:
        return self.numel * self.dtype.itemsize

    def place(self, stretch: Stretch) -> int:
        """Where a stretch of it begins in the file."""
        return self.start + stretch.first * self.dtype.itemsize


class TensorReader(ExitStack):
    """The tensors of a folder's files, each once; read by their place, no file is mapped.

    names: of the files; without them all that are there. most: tensors of the model that an update
    is for; its headers are no longer than these need, and every file has some.
    """

    def __init__(
        self, folder: Path, names: Iterable[str] | None = None, most: int | None = None
    ) -> None:
        super().__init__()
        self.folder, self.entries = folder, dict[str, Entry]()
        paths = files_of(folder) if names is None else [folder / name for name in sorted(names)]
        room = _header_room(folder, len(paths), most)
        with ExitStack() as opened:
            for path in paths:
                file = _open(path)
                opened.callback(os.close, file)
                length = _header_bytes(path, file)
                room -= length
                if room < 0:
                    raise UserError(
                        f"{path} is no safetensors file of {most:,} tensors: too long a header",
                        "train the model of this round",
                    )
                self._add(path, _entries(path, file, length, of_update=most is not None))
                if most is not None and len(self.entries) > most:
                    raise UserError(
                        f"{folder} has more tensors than the {most:,} of the model",
                        "train the model of this round",
                    )
            self.push(opened.pop_all())

    def _add(self, path: Path, entries: dict[str, Entry]) -> None:
        for name, entry in entries.items():
            if name in self.entries:
                other = self.entries[name].path.name
                raise UserError(f"{path} has {name}, as {other} does", "send it again")
            self.entries[name] = entry

    @property
    def layout(self) -> Layout:
        """File name -> tensor that learns -> shape; `UserError` where there is none."""
        layout: Layout = {}
        for name, entry in self.entries.items():
            if entry.learns:
                layout.setdefault(entry.path.name, {})[name] = entry.shape
        if not layout:
            raise UserError(f"no safetensors in {self.folder}", "give the folder of a model")
        return layout

    @property
    def floating(self) -> Layout:
        """As the layout, with those that stay."""
        layout: Layout = {}
        for name, entry in self.entries.items():
            if entry.dtype.is_floating_point:
                layout.setdefault(entry.path.name, {})[name] = entry.shape
        return layout

    @property
    def fixed(self) -> dict[str, Entry]:
        """Counts, masks and what stays: kept as it is, bit for bit, never sent nor averaged."""
        return {n: e for n, e in self.entries.items() if not e.learns}

    @property
    def stays(self) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.stays]

    def typed_as(self, dtype: torch.dtype) -> TypedLayout:
        """The files with what learns in this number format, the rest in its own."""
        layout: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for name, entry in self.entries.items():
            own = dtype if entry.learns else entry.dtype
            layout.setdefault(entry.path.name, {})[name] = (own, entry.shape)
        return layout

    def values(self, stretch: Stretch, into_N: Tensor | None = None) -> Tensor:
        """The stretch in the tensor's own number format; in memory of that format, if given."""
        entry = self.entries[stretch.name]
        values_N = torch.empty(stretch.count, dtype=entry.dtype) if into_N is None else into_N
        content: Any = values_N.view(torch.uint8).numpy()
        view, done = memoryview(content), 0
        place = entry.place(stretch)
        while done < len(view):
            got = os.preadv(entry.file, [view[done:]], place + done)
            if got == 0:
                raise UserError(f"{entry.path} ends early, at {stretch.name}", "send it again")
            done += got
        return values_N


class TensorWriter(ExitStack):
    """Files of a folder, their headers first; once it is closed, all is on the disk.

    direct: around the page cache, where it can be; for files that are not soon read again.
    """

    def __init__(
        self, folder: Path, layout: TypedLayout, stays: Iterable[str] = (), direct: bool = False
    ) -> None:
        super().__init__()
        self.entries: dict[str, Entry] = {}
        staying = frozenset(stays)
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            for name, tensors in layout.items():
                file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                opened.callback(os.close, file)
                opened.callback(sync, file)  # first: what is called last, is called first
                self.entries |= _written_header(folder / name, file, tensors, staying)
            self.direct: DirectWrites | None = None
            if direct and is_own_disk(folder):
                files = {entry.file: entry.path for entry in self.entries.values()}
                self.direct = opened.enter_context(DirectWrites(files))
            self.push(opened.pop_all())

    def put(self, stretch: Stretch, values_N: Tensor) -> None:
        """Write a stretch of a tensor, in the number format of the header."""
        entry = self.entries[stretch.name]
        content_B = values_N.to(entry.dtype).contiguous().view(torch.uint8)
        place = entry.place(stretch)
        if self.direct is not None:
            self.direct.write(entry.file, content_B, place)
            return
        content: Any = content_B.numpy()
        write_at(entry.file, memoryview(content), place)
        # the disk begins with it now, while the next stretches are computed, and not at the end
        os.posix_fadvise(entry.file, place, content.size, os.POSIX_FADV_DONTNEED)

    def wait(self) -> None:
        """Until all that was put can be read."""
        if self.direct is not None:
            self.direct.wait()


def copy_fixed(before: TensorReader, *writers: TensorWriter) -> None:
    """Counts, masks and what stays of the model before."""
    for name, entry in before.fixed.items():
        for first in range(0, entry.numel, STRETCH):
            stretch = Stretch(name, first, min(STRETCH, entry.numel - first))
            for writer in writers:
                writer.put(stretch, before.values(stretch))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def typed(layout: Layout, dtype: torch.dtype) -> TypedLayout:
    return {file: {n: (dtype, shape) for n, shape in t.items()} for file, t in layout.items()}


def bytes_of(layout: TypedLayout) -> int:
    """Of all tensors together."""
    tensors = [about for file in layout.values() for about in file.values()]
    return sum(prod(shape) * dtype.itemsize for dtype, shape in tensors)


def stretches(layout: Layout) -> Iterator[Stretch]:
    """All values of a model, in the order in which they are always taken."""
    for tensors in layout.values():
        for name, shape in tensors.items():
            total = prod(shape)
            for first in range(0, total, STRETCH):
                yield Stretch(name, first, min(STRETCH, total - first))


def _open(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "send it again") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UserError(f"{path} is no plain file", "do not use what comes from there")
    return file


def _header_room(folder: Path, files: int, most: int | None) -> float:
    """Bytes that the headers of an update may have; of a folder of one's own any."""
    if most is None:
        return math.inf
    if files > most:
        raise UserError(
            f"{folder} has {files:,} files: empty ones, or more tensors than the {most:,} of the "
            "model",
            "train the model of this round",
        )
    return most * TENSOR_HEADER_BYTES + files * FILE_HEADER_BYTES


def _header_bytes(path: Path, file: int) -> int:
    """The length of a file's header, where the file has as much."""
    size = os.fstat(file).st_size
    head = os.pread(file, 8, 0)
    length: int = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise UserError(
            f"{path} is no safetensors file: {size:,} bytes, its header claims {length:,}",
            "send it again; if it stays so, do not use what comes from there",
        )
    return length


def _entries(path: Path, file: int, length: int, of_update: bool) -> dict[str, Entry]:
    """What the header of a file says, where all of it holds together."""
    size, place = os.fstat(file).st_size, 8 + length
    try:
        header = json.loads(os.pread(file, length, 8))
        metadata = header.pop("__metadata__", None)
        if of_update and not (header and _is_text(metadata)):
            raise ValueError("no tensors, or metadata that is not text")
        stays = _staying(metadata)
        entries = {
            name: _entry(path, file, about, place, name in stays) for name, about in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # of the header's making, whatever it is: lists for numbers, numbers for names
        raise UserError(f"{path} has a header that is not safetensors'", "send it again") from None
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        refuse_name(name, TENSOR_NAME, f"{path} names a tensor")
        if entry.start != place:
            raise UserError(f"{path}: tensor {name} overlaps another or a gap", "send it again")
        place += entry.size
    if place != size:
        raise UserError(f"{path} has {size:,} bytes, its header says {place:,}", "send it again")
    return entries


def _is_text(metadata: Any) -> bool:
    """As the format has it: names and text, or none."""
    return metadata is None or all(isinstance(text, str) for text in metadata.values())


def _staying(metadata: Any) -> frozenset[str]:
    """Names of tensors that a file's metadata says do not learn."""
    names = metadata.get(STAYS) if isinstance(metadata, dict) else None
    return frozenset(names.split()) if isinstance(names, str) else frozenset()


def _entry(path: Path, file: int, about: dict[str, Any], begin: int, stays: bool = False) -> Entry:
    shape, offsets = about["shape"], about["data_offsets"]
    whole = [type(number) is int for number in (*shape, *offsets)]
    if len(shape) > MAX_DIMENSIONS or len(offsets) != 2 or not all(whole):
        raise ValueError("numbers that are not whole, or too many")
    begins_and_ends = 0 <= offsets[0] <= offsets[1] <= 8 * MAX_VALUES
    if not begins_and_ends or not all(0 <= length <= MAX_VALUES for length in shape):
        raise ValueError("numbers that no file has")
    entry = Entry(path, file, DTYPES[about["dtype"]], tuple(shape), begin + offsets[0], stays)
    if offsets[1] - offsets[0] != entry.size:
        raise ValueError("sizes that do not add up")
    return entry


def _written_header(
    path: Path,
    file: int,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    stays: frozenset[str],
) -> dict[str, Entry]:
    """Write the header, and take all the room that the file will need."""
    staying = " ".join(name for name in tensors if name in stays)
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"} | ({STAYS: staying} if staying else {})
    }
    place = 0
    for name, (dtype, shape) in tensors.items():
        end = place + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    try:
        os.posix_fallocate(file, 0, begin + max(place, 1))
    except OSError as error:
        raise UserError(
            f"{path} needs {begin + place:,} bytes: {error.strerror}",
            "make room there, then type the same line again",
        ) from None
    os.ftruncate(file, begin + place)
    write_at(file, memoryview(struct.pack("<Q", len(text)) + text), 0)
    return {n: _entry(path, file, header[n], begin) for n in tensors}
