"""This rank among the others: its device, its groups, and errors that all ranks share."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atoll.errors import UserError
from atoll.launch import Placement
from atoll.settings import Run
from atoll.sharding.own_device import own_device
from atoll.sharding.transport import FABRICS, failed_start, nccl_log, networks_of, refusal

Result = TypeVar("Result")


class SharedError(UserError):
    """A user's mistake that every rank knows of, so that one of them may speak for all."""


@dataclass(frozen=True)
class World:
    """A rank's view: numbers, device, and a gloo group for each thread that talks.

    Ranks match the calls of a group by their order, which two threads would not keep.
    """

    rank: int
    size: int
    device: torch.device
    host_group: Any = None  # for objects, between the main threads; None in a single process
    checkpoint_group: Any = None  # between the threads that save
    networks: tuple[str, ...] = ()  # that NCCL uses between nodes, as it says itself


@contextmanager
def joined(run: Run, placement: Placement) -> Iterator[World]:
    """Join the process group for the length of a `with`, and leave it in the end.

    Raises `UserError` if the ranks that were started are not those the run asks for.
    """
    if placement.world_size != run.world_size:
        raise SharedError(
            f"{placement.world_size} ranks were started, the run asks for {run.world_size} "
            f"({run.nodes} nodes x {run.ranks_per_node})",
            "start the run through its launch.sh, or set nodes and ranks_per_node",
        )
    device = own_device(run, placement)
    if run.deterministic:
        _be_deterministic()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if placement.world_size == 1:
        with _alone(run, backend):
            yield World(0, 1, device)
        return
    with nccl_log(placement) as log:
        host, checkpoint = _started(run, placement, device, backend, log)
        networks = tuple(networks_of(log))
    try:
        yield World(placement.rank, placement.world_size, device, host, checkpoint, networks)
    finally:
        dist.destroy_process_group()


def _started(
    run: Run, placement: Placement, device: torch.device, backend: str, log: Path | None
) -> tuple[Any, Any]:
    """Start the process group and its two of gloo, up to a first collective on the devices."""
    timeout = timedelta(minutes=run.training.timeout_minutes)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{placement.master_address}:{placement.master_port}",
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
    except dist.DistBackendError as error:
        raise failed_start(log, error, os.environ) from error
    host, checkpoint = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    return host, checkpoint


def check_transport(run: Run, world: World) -> None:
    """Refuse, on all ranks, to train over TCP where the facility has a fabric."""
    if run.nodes == 1 or run.facility.network.fabric not in FABRICS:
        return
    networks = {name for each in gathered(world, world.networks) for name in each}
    error = refusal(run, sorted(networks))
    if error is not None:
        raise SharedError(error.found, error.hint)


@contextmanager
def _alone(run: Run, backend: str) -> Iterator[None]:
    """DeepSpeed wants a process group even of one; nothing else does."""
    if run.sharding.step_engine != "deepspeed":
        yield
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_on_all_ranks(world: World, function: Callable[[], Result]) -> Result:
    """Run `function` on every rank; if it fails on one, raise the same error on all.

    Only for calls that do not themselves wait for other ranks after a failure.
    """
    result, error = None, None
    try:
        result = function()
    except (UserError, OSError) as caught:
        error = _as_user_error(caught)
    errors = gathered(world, None if error is None else (error.found, error.hint))
    for rank, pair in enumerate(errors):
        if pair is not None:
            found, hint = pair
            where = "" if all(errors) else f" (rank {rank} of {world.size})"
            raise SharedError(found + where, hint) from error
    return result  # type: ignore[return-value]


def gathered(world: World, value: Any) -> list[Any]:
    """The value of every rank, in order of rank, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.host_group)
    return values


def summed(world: World, values: torch.Tensor) -> torch.Tensor:
    """The elementwise sum over all ranks."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def disk_error(error: OSError) -> UserError:
    """A full or failing disk, in a person's words."""
    return UserError(
        f"writing {error.filename or 'a file'} failed: {error.strerror or error}",
        "free some space or raise the quota, then start the run again: it resumes",
    )


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def _as_user_error(error: UserError | OSError) -> UserError:
    return error if isinstance(error, UserError) else disk_error(error)


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by cuBLAS's manual
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
