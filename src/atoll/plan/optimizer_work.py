"""What an optimizer's step computes beside reading and writing its state."""

from atoll.plan.shapes import Shape, family_of
from atoll.settings import Run

ITERATIONS = 5  # of Newton and Schulz, as train.muon takes them


def orthogonal_flops(run: Run, shape: Shape) -> float:
    """Of Muon, in bf16: each rank takes all whole matrices of its stage, and its own experts.

    Where ranks copy each other they all do the same.
    """
    if run.optimizer.name != "muon" or run.model.lora is not None:
        return 0.0
    hidden, wide = shape.hidden, shape.expert_width
    block = 2 * (_iterations(hidden, shape.query_width) + _iterations(hidden, shape.kv_width))
    if shape.experts:  # whose first and third matrix are one
        own = shape.experts / _expert_parts(run, shape)
        block += own * (_iterations(hidden, 2 * wide) + _iterations(hidden, wide))
    else:
        block += (3 if family_of(shape.family).gated else 2) * _iterations(hidden, wide)
    return -(-shape.layers // run.axes.pipeline) * block


def _expert_parts(run: Run, shape: Shape) -> int:
    """Among how many ranks whole experts are divided."""
    if "fsdp" not in run.sharding.layouts or not shape.experts:
        return 1
    return min(shape.experts, run.axes.shard * run.axes.context)


def _iterations(height: int, width: int) -> float:
    """Two products of each are of a square of the lesser side with the matrix, one with itself."""
    low, high = sorted((height, width))
    return ITERATIONS * (4.0 * low**2 * high + 2.0 * low**3)
