"""This rank among the others: its device, its groups, and errors that all ranks share."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from atoll.errors import UserError
from atoll.launch import Placement
from atoll.settings import Run
from atoll.sharding import agreement
from atoll.sharding.own_device import own_device
from atoll.sharding.transport import FABRICS, failed_start, nccl_log, networks_of, refusal
from atoll.sharding.tree import Tree, join

Result = TypeVar("Result")
# A gloo group takes a socket for each other rank; rank 0's store has one for every rank.
FILES_PER_RANK = 16
FILES_OF_SHARDS = 4 * 512  # tokens and what is learned of them, to train on and held out
MEETING = timedelta(minutes=30)  # the longest that a rank waits for another to come


class SharedError(UserError):
    """A user's mistake that every rank knows of, so that one of them may speak for all."""


@dataclass(frozen=True)
class World:
    """A rank's view: numbers, device, and a tree of all ranks for each thread that talks.

    Ranks match the calls of a tree by their order, which two threads would not keep.
    """

    rank: int
    size: int
    device: torch.device
    host_tree: Tree | None = None  # between the main threads; None in a single process
    checkpoint_tree: Tree | None = None  # between the threads that save
    background: agreement.Background | None = None  # what is agreed on beside a step
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
    _allow_open_files(placement.world_size)
    if placement.world_size == 1:
        with _alone(run, backend_of(run, device)):
            yield World(0, 1, device)
        return
    with nccl_log(placement) as log:
        trees = _started(run, placement, device, log)
        networks = tuple(networks_of(log))
    try:
        with talking(trees, device, networks) as world:
            yield world
    finally:
        dist.destroy_process_group()


@contextmanager
def beside_each_other(placement: Placement, device: torch.device) -> Iterator[World]:
    """Ranks that hear of each other, and compute each for itself: there is no process group."""
    rank, size, first_host = placement.rank, placement.world_size, placement.master_address
    if size == 1:
        yield World(0, 1, device)
        return
    url = f"tcp://{first_host}:{placement.master_port}"
    store, _, _ = next(rendezvous(url, rank, size, timeout=MEETING))
    trees = join(store, rank, size, first_host, MEETING.total_seconds(), count=3)
    with talking(trees, device) as world:
        yield world


@contextmanager
def talking(
    trees: list[Tree], device: torch.device, networks: tuple[str, ...] = ()
) -> Iterator[World]:
    """The world of three trees, which are left in the end: who waits for this rank hears of it."""
    host, checkpoint, beside = trees
    background = agreement.Background(beside)
    try:
        yield World(host.rank, host.size, device, host, checkpoint, background, networks)
    finally:
        background.close()
        checkpoint.close()
        host.close()


def backend_of(run: Run, device: torch.device) -> str:
    """NCCL alone on devices, where gloo would connect every rank with every other.

    Only what offload keeps in the host's memory is reduced there as well.
    """
    if device.type != "cuda":
        return "gloo"
    offload = run.sharding.offload or run.sharding.engine == "deepspeed"
    return "cpu:gloo,cuda:nccl" if offload else "nccl"


def set_timeouts(run: Run) -> None:
    """Let the collectives of all groups so far take as long as the run says.

    torch's meshes and DeepSpeed make theirs with the backend's own limit, 10 minutes with NCCL.
    """
    timeout = timedelta(minutes=run.training.timeout_minutes)
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def _started(run: Run, placement: Placement, device: torch.device, log: Path | None) -> list[Tree]:
    """Start the process group, up to a first collective on the devices, and the three trees."""
    timeout = timedelta(minutes=run.training.timeout_minutes)
    rank, size, first_host = placement.rank, placement.world_size, placement.master_address
    url = f"tcp://{first_host}:{placement.master_port}"
    try:
        store, _, _ = next(rendezvous(url, rank, size, timeout=timeout))
    except dist.DistNetworkError as error:
        if rank != 0 or "EADDRINUSE" not in str(error):
            raise
        raise SharedError(
            f"port {placement.master_port} of {first_host} is in use by another program",
            "set another one, facility.port=NUMBER, or leave --port out",
        ) from None
    try:
        dist.init_process_group(
            backend_of(run, device),
            store=dist.PrefixStore("devices", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
    except dist.DistBackendError as error:
        raise failed_start(log, error, os.environ) from error
    return join(store, rank, size, first_host, timeout.total_seconds(), count=3)


def _allow_open_files(ranks: int) -> None:
    """As many as connections and shards may need, where a process may raise its own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + FILES_OF_SHARDS + FILES_PER_RANK * ranks
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
    failed = first_failure(world, None if error is None else (error.found, error.hint))
    if failed is not None:
        found, hint = failed.what
        where = "" if failed.ranks == world.size else f" (rank {failed.rank} of {world.size})"
        raise SharedError(found + where, hint) from error
    return result  # type: ignore[return-value]


def run_on_first_rank(world: World, function: Callable[[], Result]) -> Result:
    """Run `function` on rank 0; its result, or its error, is every rank's."""
    result = run_on_all_ranks(world, lambda: function() if world.rank == 0 else None)
    return of_first(world, result)


def first_failure(world: World, what: Any) -> agreement.Failures | None:
    """The first rank's that is not None, on every rank; None where all are."""
    if world.host_tree is None:
        return None if what is None else agreement.Failures(0, what, 1)
    return agreement.first_failure(world.host_tree, what)


def gathered(world: World, value: Any) -> list[Any]:
    """The value of every rank, in order of rank, on every rank."""
    return [value] if world.host_tree is None else agreement.gathered(world.host_tree, value)


def gathered_by_first(world: World, value: Any) -> list[Any]:
    """The value of every rank, in order of rank, on rank 0; nothing on the others."""
    if world.host_tree is None:
        return [value]
    return agreement.gathered_by_first(world.host_tree, value) or []


def of_first(world: World, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return value if world.host_tree is None else agreement.of_first(world.host_tree, value)


def merged_of_all(world: World, value: Result, merge: Callable[[list[Result]], Result]) -> Result:
    """The values of all ranks merged on their way, on every rank."""
    if world.host_tree is None:
        return merge([value])
    merged: Result = agreement.merged(world.host_tree, value, merge)
    return merged


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.host_tree is not None:
        agreement.barrier(world.host_tree)


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
