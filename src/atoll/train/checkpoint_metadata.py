"""DCP's `.metadata`: each rank pickles the entries of what it wrote, the first one joins the bytes.

The file is one pickle: a head that makes an empty list of parts for each tensor, then the ranks'
entries one behind the other, each of which is added to its list. Any DCP reads it; no rank has the
others' entries as objects, and none pickles them.
"""

import io
import itertools
import math
import os
import pickle
import struct
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from atoll.train.checkpoint_files import Part, Written, numbers_in

METADATA = ".metadata"
PROTOCOL = 2
# opcodes of pickle: take from and put into the memo by a short and by a long number
GET, LONG_GET, PUT, LONG_PUT = pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT
SHARED = (ChunkStorageMetadata, MetadataIndex)  # classes that every entry names
STORAGE, FIRST_LIST = len(SHARED), 16


class Named(NamedTuple):
    """A tensor of the checkpoint: its properties and size, pickled, and how much is written."""

    about: bytes
    numbers: int
    written: int


Table = dict[str, Named]  # in order of name, once it is of all ranks


def table_of(written: Written) -> Table:
    """The tensors of which this rank has a part."""
    table: Table = {}
    wrote: dict[str, int] = defaultdict(int)
    own = {result.index for result in written.results}
    for item in written.items:
        assert item.tensor_data is not None
        name, data = item.index.fqn, item.tensor_data
        about = _dumped("properties") + _dumped(data.properties)
        about += _dumped("size") + _dumped(data.size)
        wrote[name] += numbers_in(item) * (item.index in own)
        table[name] = Named(about, math.prod(data.size), wrote[name])
    return table


def merged_tables(tables: list[Table]) -> Table:
    """Of several ranks, in order of name."""
    merged: Table = {}
    for table in tables:
        for name, named in table.items():
            before = merged[name].written if name in merged else 0
            merged[name] = named._replace(written=named.written + before)
    return dict(sorted(merged.items()))


def missing(table: Table) -> str | None:
    """The first tensor of which not every number is written."""
    lacking = (name for name, named in table.items() if named.written < named.numbers)
    return next(lacking, None)


def entries(written: Written, table: Table) -> bytes:
    """What this rank adds to the pickle: the parts that it wrote, and where they are; compressed,
    which leaves a twentieth for the first rank to collect."""
    numbers = _numbered(table)
    chunks = {item.index: item.tensor_data.chunk for item in written.items if item.tensor_data}
    lines = []
    for result in written.results:
        index = result.index
        lines.append(LONG_GET + numbers[index.fqn] + _dumped(chunks[index]))
        lines.append(pickle.APPEND + pickle.POP + GET + bytes([STORAGE]))
        lines.append(_dumped(MetadataIndex(index.fqn, index.offset)))
        lines.append(_dumped(result.storage_data) + pickle.SETITEM + pickle.POP)
    whole = b"".join(lines)
    for number, kind in enumerate(SHARED):
        whole = whole.replace(_dumped(kind), GET + bytes([number]))
    return zlib.compress(whole, level=1)


def write_metadata(folder: Path, table: Table, entries_of_ranks: list[bytes]) -> list[int]:
    """Join the file and sync it, on one rank; the bytes of its head and of each rank's entries."""
    with (folder / METADATA).open("wb") as file:
        sizes = [file.write(_head(folder, table))]
        sizes += [file.write(zlib.decompress(of_rank)) for of_rank in entries_of_ranks]
        file.write(pickle.STOP)
        file.flush()
        os.fsync(file.fileno())
    return sizes


def metadata_of(folder: Path, sizes: Sequence[int], parts: Mapping[Part, int]) -> Metadata | None:
    """What the file says of these parts alone; None where it has others, from another layout.

    sizes: as `write_metadata` gave them. parts: each with the rank that wrote it.
    """
    if not sizes or max(parts.values(), default=0) >= len(sizes) - 1:
        return None
    starts = list(itertools.accumulate(sizes))
    with (folder / METADATA).open("rb") as file:
        pieces = [file.read(sizes[0])]
        for rank in sorted(set(parts.values())):
            file.seek(starts[rank])
            pieces.append(file.read(sizes[rank + 1]))
    metadata: Metadata = pickle.loads(b"".join([*pieces, pickle.STOP]))
    written = {
        Part(name, chunk.offsets, chunk.sizes)
        for name, about in metadata.state_dict_metadata.items()
        for chunk in about.chunks
    }
    return metadata if parts.keys() <= written else None


def _head(folder: Path, table: Table) -> bytes:
    """The object, its lists and its dictionary still empty."""
    numbers = _numbered(table)
    lines = [pickle.PROTO + bytes([PROTOCOL])]
    lines += [
        _dumped(kind) + PUT + bytes([number]) + pickle.POP for number, kind in enumerate(SHARED)
    ]
    lines.append(pickle.EMPTY_DICT + PUT + bytes([STORAGE]) + pickle.POP)
    lines += [pickle.EMPTY_LIST + LONG_PUT + number + pickle.POP for number in numbers.values()]
    tensors = b"".join(
        _dumped(name)
        + _instance(
            TensorStorageMetadata, named.about + _dumped("chunks") + LONG_GET + numbers[name]
        )
        for name, named in table.items()
    )
    content = {name: _dumped(value) for name, value in vars(Metadata({})).items()}
    content["state_dict_metadata"] = pickle.EMPTY_DICT + pickle.MARK + tensors + pickle.SETITEMS
    content["planner_data"] = _dumped({name: (name,) for name in table})
    content["storage_data"] = GET + bytes([STORAGE])
    content["storage_meta"] = _dumped(FileSystemWriter(folder).storage_meta())
    state = b"".join(_dumped(name) + value for name, value in content.items())
    return b"".join([*lines, _instance(Metadata, state)])


def _numbered(table: Table) -> dict[str, bytes]:
    """Where the memo has each tensor's list."""
    return {name: struct.pack("<I", FIRST_LIST + n) for n, name in enumerate(table)}


def _instance(kind: type, state: bytes) -> bytes:
    """An object of a class without calling it, its attributes set from pickled pairs."""
    made = _dumped(kind) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return made + pickle.EMPTY_DICT + pickle.MARK + state + pickle.SETITEMS + pickle.BUILD


def _dumped(value: Any) -> bytes:
    """The opcodes that make a value and leave it on the stack, without any use of the memo."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)]
