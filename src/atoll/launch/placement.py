"""One rank's place among all ranks, and the device that goes with it."""

from dataclasses import dataclass, replace

from atoll.errors import UserError


@dataclass(frozen=True)
class Placement:
    """One rank's place among all ranks, and the address where rank 0's store listens.

    `source` says where the numbers came from: explicit, slurm, pals, ompi, single, local or fork.
    `master_port` 0 means that nobody else has to know the port: the launcher takes a free one.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int
    master_address: str
    master_port: int
    source: str

    def environment(self) -> dict[str, str]:
        """The standard names under which torch reads a placement."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }

    def local(self, local_rank: int, local_world_size: int, source: str) -> "Placement":
        """Place one of the `local_world_size` ranks started by this task, alone on its node."""
        assert self.world_size == self.node_count, "one task per node"
        return replace(
            self,
            rank=self.node_rank * local_world_size + local_rank,
            world_size=self.node_count * local_world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            source=source,
        )


def device_index(local_rank: int, local_world_size: int, visible_device_count: int) -> int:
    """Choose the device of a rank: the only visible one, else the one numbered as its local rank.

    The scheduler's visibility masks stay as they are. Raises UserError where ranks outnumber the
    visible devices.
    """
    assert 0 <= local_rank < local_world_size
    if visible_device_count == 1:
        return 0
    if local_world_size > visible_device_count:
        raise UserError(
            f"{local_world_size} ranks on this node, {visible_device_count} devices visible",
            "start as many ranks per node as devices, or ask the scheduler for more devices",
        )
    return local_rank
