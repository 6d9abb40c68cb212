"""How many ranks each axis of the mesh has: what every strategy is made of."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.settings.run import Run


@dataclass(frozen=True)
class Axes:
    """Sizes, from the outermost to the innermost; their product is the world size.

    pipeline: stages, each with some of the layers. replicate, shard: ranks with samples of their
    own, whose parameters are copies (replicate) or parts (shard). context: parts of a sample's
    tokens. tensor: parts of each layer's matrices, and of the tokens between them. expert: ranks
    among those of shard and context that have each some of a mixture's experts; it multiplies
    nothing.
    """

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int = 1

    @property
    def data(self) -> int:
        """Ranks with samples of their own."""
        return self.replicate * self.shard

    @property
    def averaged(self) -> int:
        """Ranks over whose gradients of a block FSDP and DDP take the mean."""
        return self.data * self.context

    @property
    def tokens(self) -> int:
        """Parts into which a sample's tokens are cut between the layers."""
        return self.context * self.tensor

    def data_rank(self, rank: int) -> int:
        """Which share of the samples a rank has."""
        return rank // self.tokens % self.data

    def stage(self, rank: int) -> int:
        """Which rank of its pipeline a rank is."""
        return rank // (self.world // self.pipeline)

    def context_rank(self, rank: int) -> int:
        return rank // self.tensor % self.context

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    @property
    def world(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor


def axes_of(run: "Run") -> Axes:
    """The sizes a run's settings ask for.

    Raises `ValueError` with the numbers if they do not multiply to the world size.
    """
    sharding = run.sharding
    divided = (sharding.pipeline, sharding.context, sharding.tensor, sharding.expert)
    return _axes(run.world_size, run.ranks_per_node, sharding.shard, *divided)


@lru_cache(maxsize=4096)  # the planner asks for the same ones often
def _axes(
    world: int,
    ranks_per_node: int,
    shard_by: str | int,
    pipeline: int,
    context: int,
    tensor: int,
    expert: int,
) -> Axes:
    taken = pipeline * context * tensor
    if world % taken:
        raise ValueError(
            f"world size ({world}) must be divisible by sharding.pipeline x context x tensor "
            f"({pipeline} x {context} x {tensor} = {taken})"
        )
    data = world // taken
    in_node = max(1, ranks_per_node // (context * tensor))
    named = {"none": 1, "node": min(in_node, data), "all": data}
    shard = shard_by if isinstance(shard_by, int) else named[shard_by]
    if data % shard:
        whole = f"the ranks with samples of their own ({data} of {world})"
        who = f"world size ({world})" if taken == 1 else whole
        raise ValueError(f"{who} must be divisible by sharding.shard ({shard})")
    if (shard * context) % expert:
        raise ValueError(
            f"the shard group ({shard * context} ranks) must be divisible by "
            f"sharding.expert ({expert})"
        )
    return Axes(pipeline, data // shard, shard, context, tensor, expert)
