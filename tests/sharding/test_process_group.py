"""What connects ranks beside the tree, and how many files that may open."""

import resource
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch
from rank_pool import RankPool
from torch.distributed import distributed_c10d

from atoll.data.samples import OPEN_SHARDS
from atoll.errors import UserError
from atoll.launch import Placement
from atoll.settings import Run
from atoll.sharding import process_group
from atoll.sharding.process_group import World, backend_of, run_on_all_ranks, run_on_first_rank
from atoll.train import train as trainer


@pytest.mark.parametrize(
    ("strategy", "device", "backend"),
    [
        ("full_shard", "cuda", "nccl"),
        ("ddp", "cuda", "nccl"),
        ("full_shard_offload", "cuda", "cpu:gloo,cuda:nccl"),
        ("deepspeed_zero2", "cuda", "cpu:gloo,cuda:nccl"),
        ("full_shard", "cpu", "gloo"),
    ],
)
def test_gloo_connects_all_with_all_only_where_it_must(
    strategy: str, device: str, backend: str
) -> None:
    run = small_run.settings(Path("/nowhere"), 2, sharding=small_run.sharding(strategy))
    assert backend_of(run, torch.device(device)) == backend


@pytest.mark.parametrize(("hard", "wanted"), [(50_000, 35_072), (20_000, 20_000), (-1, 35_072)])
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(
    monkeypatch: pytest.MonkeyPatch, hard: int, wanted: int
) -> None:
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    process_group._allow_open_files(2000)
    assert limits == [(wanted, hard)]


def test_a_rank_alone_may_have_all_the_shards_open_that_are_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, -1))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit[0]))
    run = small_run.settings(Path("/nowhere"), 1, sharding=small_run.sharding("single"))
    with process_group.joined(run, Placement(0, 1, 0, 1, 0, 1, "localhost", 0, "single")):
        assert limits[0] > 4 * OPEN_SHARDS


def errors_of(world: World) -> list[str]:
    def failing(rank: int) -> None:
        if world.rank >= rank:
            raise UserError(f"found by {world.rank}", "hint")

    def on_first() -> None:
        raise OSError(28, "No space left on device", "file")

    errors = []
    for rank in (2, 0):
        with pytest.raises(UserError) as error:
            run_on_all_ranks(world, lambda rank=rank: failing(rank))
        errors.append(error.value.found)
    with pytest.raises(UserError) as error:
        run_on_first_rank(world, on_first)
    return [*errors, error.value.found, run_on_first_rank(world, lambda: f"of {world.rank}")]


def test_the_first_error_in_order_of_rank_is_every_rank_s(ranks: RankPool) -> None:
    expected = ["found by 2 (rank 2 of 4)", "found by 0"]
    expected += ["writing file failed: No space left on device (rank 0 of 4)", "of 0"]
    assert ranks.run(errors_of) == [expected] * 4


def limits_of(world: World, run: Run) -> list[timedelta]:
    """How long each group's collectives may take, as the first step begins."""
    limits = []

    def begin(*_: Any) -> int:
        for group in distributed_c10d._world.pg_map:
            backend: Any = group._get_backend(world.device)
            limits.append(backend.options._timeout)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_from", begin)
        small_run.train_here(world, run)
    return limits


@pytest.mark.parametrize(("strategy", "count"), [("hybrid_shard", 4), ("deepspeed_zero2", 2)])
def test_every_group_waits_as_long_as_the_run_says(
    ranks: RankPool, tmp_path: Path, strategy: str, count: int
) -> None:
    small_run.write_text(tmp_path)
    sharding = small_run.sharding(strategy) | ({"shard": 2} if strategy == "hybrid_shard" else {})
    run = small_run.settings(tmp_path, count, sharding=sharding, training__timeout_minutes=77)
    small_run.ready(run)
    for limits in ranks.run(limits_of, run, world=count):
        assert len(limits) > 1
        assert set(limits) == {timedelta(minutes=77)}


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        placement = Placement(0, 2, 0, 2, 0, 1, "127.0.0.1", port, "local")
        run = small_run.settings(Path("/nowhere"), 2)
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            process_group._started(run, placement, torch.device("cpu"), None)
    assert "facility.port=NUMBER" in caught.value.hint
