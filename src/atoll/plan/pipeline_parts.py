"""What each rank of a pipeline passes samples through, and who waits for whom."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from atoll.plan.shapes import Shape
from atoll.settings import Run


class Part(NamedTuple):
    """Of the model, what one rank has of a pipeline: its blocks, and 1 where it has the head."""

    layers: int
    heads: int


def parts_of(run: Run, shape: Shape) -> Sequence[Part]:
    """Of each rank of a pipeline; of all layers and the head where there is none."""
    return _parts(shape.layers, run.axes.pipeline, run.sharding.stages_per_rank)


@cache
def _parts(layers: int, ranks: int, stages_per_rank: int) -> Sequence[Part]:
    """Blocks in their order over stages as even as they go, stages in turns over ranks."""
    stages = ranks * stages_per_rank
    own = Counter(block * stages // layers % ranks for block in range(layers))
    return tuple(Part(own[rank], int(rank == ranks - 1)) for rank in range(ranks))


def busiest(
    passes: Sequence[tuple[float, float]], waits: float = 1.0
) -> tuple[float, float, float]:
    """Of ranks' (compute, memory) seconds those of the busiest, and all seconds of the others.

    waits: the share of the others' waiting that is lost; without any, the rank is an average one.
    """
    most = max(passes, key=sum)
    compute, memory = (
        waits * top + (1 - waits) * sum(each) / len(passes)
        for top, each in zip(most, zip(*passes, strict=True), strict=True)
    )
    return compute, memory, sum(map(sum, passes)) - sum(most)
