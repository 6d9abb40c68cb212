"""Digests of files while they are written, a little behind whoever writes them."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.federation.tensors import Layout, Stretch, TensorWriter, stretches

PIECE_BYTES = 4 << 20


class DigestsBehind:
    """The sha256 of each file of a folder, in memory as far as its stretches are whole, in order.

    What comes in the layout's order is not read from the files: they may be written yet.

    What lies between them (headers, tensors that stay) has to be written before the first.
    """

    def __init__(self, writer: TensorWriter, layout: Layout) -> None:
        self.writer, self.whole = writer, set[Stretch]()
        self.order: Iterator[Stretch] = stretches(layout)
        self.next = next(self.order, None)
        files = {entry.path: entry.file for entry in writer.entries.values()}
        self.files = {path: (file, hashlib.sha256()) for path, file in files.items()}
        self.places = dict.fromkeys(files, 0)
        self.piece = bytearray(PIECE_BYTES)
        self.values = dict[Stretch, Tensor]()  # of those put and not added yet

    def put(self, stretch: Stretch, values_N: Tensor) -> None:
        """Write a stretch, by any thread; it counts once it is added."""
        self.writer.put(stretch, values_N)
        self.values[stretch] = values_N

    def add(self, stretch: Stretch) -> None:
        """This stretch is put; any order will do, that of the layout needs no reading."""
        self.whole.add(stretch)
        values_N = self.values.pop(stretch, None)
        if stretch == self.next and values_N is not None:
            self._hash(stretch, values_N)
        while self.next in self.whole:
            self.whole.remove(self.next)
            entry = self.writer.entries[self.next.name]
            self._read(entry.path, entry.place(self.next) + self.next.count * entry.dtype.itemsize)
            self.next = next(self.order, None)

    def digests(self) -> dict[str, str]:
        """File name -> sha256, once all is written; the files are still open."""
        for path, (file, _) in self.files.items():
            self._read(path, os.fstat(file).st_size)
        return {path.name: hasher.hexdigest() for path, (_, hasher) in self.files.items()}

    def _hash(self, stretch: Stretch, values_N: Tensor) -> None:
        """A stretch from memory, behind what lies before it in its file."""
        entry = self.writer.entries[stretch.name]
        self._read(entry.path, entry.place(stretch))
        content: Any = values_N.to(entry.dtype).contiguous().view(torch.uint8).numpy()
        self.files[entry.path][1].update(memoryview(content))
        self.places[entry.path] += content.size

    def _read(self, path: Path, end: int) -> None:
        file, hasher = self.files[path]
        if self.places[path] < end:
            self.writer.wait()
        while (place := self.places[path]) < end:
            view = memoryview(self.piece)[: min(PIECE_BYTES, end - place)]
            if not (got := os.preadv(file, [view], place)):
                raise OSError(f"{path} ends at byte {place} of {end}, cut while it is written")
            hasher.update(view[:got])
            self.places[path] = place + got
