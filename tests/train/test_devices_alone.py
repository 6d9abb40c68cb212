"""Ranks whose process group joins devices alone, as NCCL does: it takes nothing of the host's."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from atoll.sharding.process_group import World
from atoll.train.guard import Guard
from atoll.train.replay import any_rank, differing


def no_backend(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """What torch says of a tensor on a device of which a group has no backend."""
    raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")


def found_by_any(world: World) -> tuple[str, bool, bool]:
    guard = object.__new__(Guard)
    guard.train_state = SimpleNamespace(world=world)  # type: ignore[assignment]
    guard.samples_of = lambda step: (0, 8)  # type: ignore[method-assign]
    bad = torch.tensor([1.0, float("nan" if world.rank == 1 else 2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", no_backend)
        trouble = guard.of_state({"model/bias": bad}, 4)
        assert guard.of_state({"model/bias": torch.ones(2)}, 4) is None
        flags = any_rank(world, world.rank == 1), any_rank(world, False)
    return trouble.what if trouble else "", *flags


def test_what_one_rank_finds_all_hear_of(ranks: RankPool) -> None:
    what = "the state of 1 of 2 ranks holds what is no number"
    assert ranks.run(found_by_any, world=2) == [
        (what, True, False),
        (f"{what}: model/bias", True, False),
    ]


def test_copies_are_compared_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what an optimizer counts in the host's memory, beside its moments on the device."""
    monkeypatch.setattr(dist, "all_reduce", no_backend)
    world = replace(World(0, 2, torch.device("cpu")), device=torch.device("meta"))
    state = {"moment": torch.ones(4, device="meta"), "step": torch.tensor(3.0)}
    with pytest.raises(RuntimeError, match="device type meta"):
        differing(None, state, world.device)
