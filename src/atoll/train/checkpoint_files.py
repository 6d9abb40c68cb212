"""What each rank writes of a checkpoint, in DCP's files, without asking the others.

DCP sends every rank's plan to one, which decides who writes what several have. Here each rank knows
that by itself: the others that have the same part are those of its mesh, and all of them give out
these parts in the same way.
"""

import heapq
import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from atoll import run_dir
from atoll.sharding.process_group import World, gathered, merged_of_all


class Part(NamedTuple):
    """What a rank has of a tensor: from where on, and how much of it."""

    name: str
    offsets: Sequence[int]
    sizes: Sequence[int]


class Written(NamedTuple):
    """Every part of a tensor that this rank has, and those that it wrote, with where."""

    items: list[WriteItem]
    results: list[WriteResult]

    @property
    def files(self) -> list[str]:
        """Names of the files that this rank wrote."""
        return sorted({result.storage_data.relative_path for result in self.results})


def holders_of_plain(state: dict[str, Tensor], world: World) -> list[int]:
    """The ranks whose tensors without a mesh have the same names as this one's. All ranks call."""
    names = sorted(
        name
        for name, value in state.items()
        if not isinstance(value, DTensor) and not is_own(name, world.rank)
    )
    digests = gathered(world, run_dir.digest(names, 16))
    return [rank for rank, digest in enumerate(digests) if digest == digests[world.rank]]


def write_own(
    folder: Path, state: dict[str, Tensor], world: World, holders: Sequence[int]
) -> Written:
    """Write this rank's parts into `folder`, synced. holders: of tensors without a mesh."""
    # what is copied already is not to wait for what a device computes meanwhile
    writer = dcp.FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), world.rank == 0)
    plan = planner.create_local_plan()
    writers = writers_of(plan.items, state, world.rank, holders)
    own = replace(plan, items=[i for i in plan.items if writers.get(i.index) == world.rank])
    # it numbers the files by the place of a plan
    plans = writer.prepare_global_plan([writer.prepare_local_plan(own)] * (world.rank + 1))
    writing = writer.write_data(planner.finish_plan(plans[-1]), planner)
    return Written(plan.items, writing.value() if plans[-1].items else [])


def read_own(folder: Path, state: dict[str, Tensor], metadata: Metadata | None) -> None:
    """Read this rank's parts, whoever wrote them, into the tensors of `state`.

    metadata: of these parts at least; None: what the file says of all.
    """
    reader = dcp.FileSystemReader(folder)
    if metadata is not None:
        reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
    with warnings.catch_warnings():
        # each rank reads for itself: that is what is asked for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)


def names_in(folder: Path) -> set[str]:
    """The names of all tensors of a checkpoint."""
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def parts_of(state: dict[str, Tensor], world: World, holders: Sequence[int]) -> dict[Part, int]:
    """Each part that this rank has, and who writes it."""
    items = create_default_local_save_plan(state, world.rank == 0).items
    writers = writers_of(items, state, world.rank, holders)
    chunks = {item.index: item.tensor_data.chunk for item in items if item.tensor_data}
    return {
        Part(index.fqn, chunks[index].offsets, chunks[index].sizes): writer
        for index, writer in writers.items()
    }


def bytes_of_all(state: dict[str, Tensor], world: World) -> int:
    """What all ranks together write of their states. All ranks call."""
    parts = parts_of(state, world, holders_of_plain(state, world))
    own = [part for part, writer in parts.items() if writer == world.rank]
    written = sum(math.prod(part.sizes) * state[part.name].element_size() for part in own)
    return merged_of_all(world, written, sum)


def writers_of(
    items: Sequence[WriteItem], state: dict[str, Tensor], rank: int, holders: Sequence[int]
) -> dict[MetadataIndex, int]:
    """Who writes each part that this rank has: one of those that have it, the bytes spread."""
    shared: dict[tuple[int, ...], list[WriteItem]] = defaultdict(list)
    for item in items:
        if numbers_in(item):
            shared[_holders(item.index.fqn, state, rank, holders)].append(item)
    return {
        item.index: writer
        for ranks, parts in shared.items()
        for item, writer in zip(parts, owners(parts, ranks), strict=True)
    }


def is_own(name: str, rank: int) -> bool:
    """Whether a tensor is this rank's alone, as 8-bit moments are (`state_dict`)."""
    return name.endswith(f"/rank{rank}")


def _holders(
    name: str, state: dict[str, Tensor], rank: int, holders: Sequence[int]
) -> tuple[int, ...]:
    value = state[name]
    if isinstance(value, DTensor):
        return tuple(holders_of(value))
    return (rank,) if is_own(name, rank) else tuple(holders)


def owners(items: Sequence[WriteItem], ranks: Sequence[int]) -> list[int]:
    """Who of these ranks writes each item: the largest first, always whoever has least so far."""
    order = sorted(range(len(items)), key=lambda n: (-_bytes(items[n]), items[n].index.fqn))
    loads = [(0, rank) for rank in sorted(ranks)]
    chosen = [0] * len(items)
    for number in order:
        load, chosen[number] = loads[0]
        heapq.heapreplace(loads, (load + _bytes(items[number]), chosen[number]))
    return chosen


def holders_of(value: DTensor) -> list[int]:
    """The ranks that have the same part of it: along the axes of its mesh that replicate it."""
    place = value.device_mesh.get_coordinate()
    if place is None:
        return []
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(value.placements, place, strict=True)
    )
    ranks: list[int] = value.device_mesh.mesh[index].flatten().tolist()
    return ranks


def numbers_in(item: WriteItem) -> int:
    """How many numbers the part has; ranks beyond an uneven tensor's end have none."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes)


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return numbers_in(item) * item.tensor_data.properties.dtype.itemsize
