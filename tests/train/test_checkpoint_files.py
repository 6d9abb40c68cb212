"""Who writes what, and one `.metadata` of all ranks' entries that any DCP reads."""

import dataclasses
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_pool import RankPool
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.sharding.process_group import World
from atoll.train import checkpoint, checkpoint_files

WHOLE = {
    "model/matrix": torch.arange(40.0).reshape(10, 4),
    "model/short": torch.arange(5.0),  # of four ranks, two get nothing of it
    "model/half": torch.arange(12.0, dtype=torch.bfloat16).reshape(4, 3),
    "model/plain": torch.arange(7.0),
    "model/none": torch.zeros(0, 3),
    "step": torch.tensor(3.0),
}


def spread(world: World, layout: str) -> dict[str, torch.Tensor]:
    """The same numbers, as a strategy would have them on four ranks."""
    state = {name: value.clone() for name, value in WHOLE.items()}
    if layout == "copies":
        return state
    placements: list[Any] = [Shard(0)]
    mesh = init_device_mesh("cpu", (4,))
    if layout == "hybrid":
        mesh, placements = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
    if layout == "two axes":
        mesh, placements = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]
    for name in ("model/matrix", "model/short", "model/half"):
        own = placements if state[name].ndim > 1 else [placements[0], *placements[1:-1], Shard(0)]
        state[name] = distribute_tensor(state[name], mesh, own[: mesh.ndim])
    if layout == "own names":
        state[f"optimizer/x/rank{world.rank}"] = torch.full((2,), float(world.rank))
    return state


def save(world: World, folder: Path, layout: str) -> None:
    progress = checkpoint.Progress(3, 24, 3000, world.size, {})
    state = spread(world, layout)
    checkpoint.finish(checkpoint.start_save(folder, state, progress, 2, world))


def save_both(world: World, folder: Path, layout: str) -> None:
    save(world, folder, layout)
    writer = dcp.FileSystemWriter(folder / "peer")
    dcp.save(spread(world, layout), storage_writer=writer)


def metadata_of(folder: Path) -> Metadata:
    content: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return content


def chunks_of(metadata: Metadata) -> dict[str, Any]:
    """Of each tensor its size, its properties, and where its parts lie, those of no numbers out."""
    return {
        name: (
            about.size,
            about.properties,
            sorted((*c.offsets, -1, *c.sizes) for c in about.chunks if math.prod(c.sizes)),
        )
        for name, about in metadata.state_dict_metadata.items()
    }


LAYOUTS = ("copies", "shards", "hybrid", "two axes", "own names")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_metadata_is_what_dcp_would_have_gathered(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    ranks.run(save_both, tmp_path, layout)
    ours = metadata_of(run_dir.checkpoint(tmp_path, 3))
    theirs = metadata_of(tmp_path / "peer")
    assert chunks_of(ours) == chunks_of(theirs)
    assert ours.planner_data == theirs.planner_data
    assert type(ours) is Metadata and vars(ours).keys() == vars(theirs).keys()
    written = [index for index, _ in ours.storage_data.items()]
    assert len(written) == sum(len(chunks) for *_, chunks in chunks_of(ours).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dcp_reads_it(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    ranks.run(save, tmp_path, layout)
    path = run_dir.checkpoint(tmp_path, 3)
    state = {name: torch.full_like(value, -1.0) for name, value in WHOLE.items()}
    dcp.load(state, checkpoint_id=path)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    for read in (state, torch.load(tmp_path / "whole.pt", weights_only=True)):
        for name, value in WHOLE.items():
            assert torch.equal(read[name], value), name


def save_as_before(world: World, folder: Path) -> None:
    """As the checkpoints were written that runs out there still have."""
    path = run_dir.checkpoints(folder) / ".partial"
    writer = dcp.FileSystemWriter(path, sync_files=True)
    dcp.save(spread(world, "hybrid"), storage_writer=writer)
    if world.rank == 0:
        names = [file.name for file in path.iterdir()]
        progress = dataclasses.asdict(checkpoint.Progress(3, 24, 3000, world.size, {}))
        content = {"files": checkpoint._as_written(path, names), "progress": progress}
        checkpoint._publish(path, content, 2)


def load(world: World, folder: Path, layout: str) -> None:
    state = spread(world, layout)
    for value in state.values():
        value.zero_()
    checkpoint.load(run_dir.checkpoint(folder, 3), state, world)
    for name, value in WHOLE.items():
        got = state[name]
        assert torch.equal(got.full_tensor() if hasattr(got, "full_tensor") else got, value), name


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_checkpoints_of_before_are_read(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    ranks.run(save_as_before, tmp_path)
    ranks.run(load, tmp_path, layout)


def load_each(world: World, folder: Path) -> None:
    for layout in LAYOUTS[:4]:
        load(world, folder, layout)


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_every_layout_of_as_many_ranks_is_read_as_every_other(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Parts may begin at the same place and end elsewhere."""
    ranks.run(save, tmp_path, layout)
    ranks.run(load_each, tmp_path)


def save_without_objects(world: World, folder: Path, layout: str) -> None:
    """No rank may hand another its plan by a group of torch."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("objects through one rank")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_object", "all_gather_object", "scatter_object_list"):
            patch.setattr(dist, name, refused)
        save(world, folder, layout)
        load(world, folder, layout)


@pytest.mark.parametrize("layout", ["copies", "hybrid"])
def test_no_rank_is_sent_the_plans_of_all(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    ranks.run(save_without_objects, tmp_path, layout)


def test_a_part_that_no_rank_writes_is_no_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(save_less, tmp_path)
    assert all("a part of model/matrix is on no rank" in answer for answer in answers)
    assert checkpoint.latest(tmp_path) is None


def save_less(world: World, folder: Path) -> str:
    writers = checkpoint_files.writers_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint_files,
            "writers_of",
            lambda items, *about: writers(
                [i for i in items if "matrix" not in i.index.fqn], *about
            ),
        )
        with pytest.raises(UserError) as error:
            save(world, folder, "shards")
    return error.value.found


def entries_read(world: World, folder: Path, layout: str) -> int:
    """How many parts' entries a rank reads of a checkpoint; -1: all that there are."""
    counts = []
    read = checkpoint.read_own

    def counting(path: Path, state: dict[str, torch.Tensor], metadata: Metadata | None) -> None:
        counts.append(-1 if metadata is None else len(metadata.storage_data))
        read(path, state, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read_own", counting)
        load(world, folder, layout)
    return counts[0]


def test_a_rank_reads_the_entries_that_it_needs(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, tmp_path, "two axes")
    every = len(metadata_of(run_dir.checkpoint(tmp_path, 3)).storage_data)
    counts = ranks.run(entries_read, tmp_path, "two axes")
    assert min(counts) > 0 and sum(counts) < 4 * every
    # laid out in another way, or by other ranks, they read them all
    assert ranks.run(entries_read, tmp_path, "hybrid") == [-1] * 4
    assert ranks.run(entries_read, tmp_path, "copies", world=2) == [-1] * 2


def item(name: str, numbers: int) -> Any:
    """As far as owners need one."""
    properties = SimpleNamespace(dtype=torch.float32)
    chunk = SimpleNamespace(sizes=(numbers,))
    data = SimpleNamespace(chunk=chunk, properties=properties)
    return SimpleNamespace(index=SimpleNamespace(fqn=name), tensor_data=data)


def test_copies_are_given_out_evenly_and_alike_on_every_rank() -> None:
    items = [item(f"layer{n}", 10 + n % 7) for n in range(100)] + [item("embedding", 300)]
    chosen = checkpoint_files.owners(items, [5, 1, 3])
    assert chosen == checkpoint_files.owners(items, [1, 3, 5])
    loads = dict.fromkeys((1, 3, 5), 0)
    for each, rank in zip(items, chosen, strict=True):
        loads[rank] += each.tensor_data.chunk.sizes[0]
    assert max(loads.values()) - min(loads.values()) <= 16


def test_what_is_written_waits_for_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was copied before; torch's writer would wait for a stream again and again."""

    def waits(*_: Any, **__: Any) -> Any:
        raise AssertionError("it waits for a device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", waits)
    world = World(0, 1, torch.device("cpu"))
    written = checkpoint_files.write_own(tmp_path, WHOLE, world, [0])
    assert len(written.results) == sum(tensor.numel() > 0 for tensor in WHOLE.values())
