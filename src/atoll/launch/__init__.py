"""Start the ranks of a run from what the scheduler left behind, with the standard library alone."""

from atoll.launch.command import main, start_local_ranks, threads_per_rank, with_port
from atoll.launch.hostlist import expand_hosts
from atoll.launch.placement import Placement, device_index
from atoll.launch.ranks import placement_from

__all__ = [
    "Placement",
    "device_index",
    "expand_hosts",
    "main",
    "placement_from",
    "start_local_ranks",
    "threads_per_rank",
    "with_port",
]
