"""What an optimizer's step computes beside reading and writing its state."""

from atoll.plan.shapes import Shape, family_of
from atoll.settings import Run

FUSED = ("gpt2", "gpt_neox", "phi3")  # queries, keys and values are one matrix
ITERATIONS = 5  # of Newton and Schulz, as train.muon takes them


def orthogonal_flops(run: Run, shape: Shape) -> float:
    """Of Muon, in bf16: each rank takes all whole matrices of its stage, and its own experts.

    Where ranks copy each other they all do the same.
    """
    if run.optimizer.name != "muon" or run.model.lora is not None:
        return 0.0
    hidden, wide, gated = shape.hidden, shape.expert_width, family_of(shape.family).gated
    if shape.family in FUSED:
        block = _iterations(hidden, shape.query_width + 2 * shape.kv_width)
        block += _iterations(hidden, shape.query_width)
    else:
        block = 2 * (_iterations(hidden, shape.query_width) + _iterations(hidden, shape.kv_width))
    if shape.experts:  # whose first and third matrix are one
        block += _own_experts(run, shape) * _gated_in_one(hidden, wide)
    elif shape.family in FUSED and gated:
        block += _gated_in_one(hidden, wide)
    else:
        block += (3 if gated else 2) * _iterations(hidden, wide)
    return -(-shape.layers // run.axes.pipeline) * block


def _gated_in_one(hidden: int, wide: int) -> float:
    return _iterations(hidden, 2 * wide) + _iterations(hidden, wide)


def _own_experts(run: Run, shape: Shape) -> int:
    """Whole experts of the fullest rank; beside an expert axis FSDP divides each of them."""
    parts = run.axes.expert
    if parts == 1 and "fsdp" in run.sharding.layouts:
        parts = run.axes.shard * run.axes.context
    return -(-shape.experts // parts)


def _iterations(height: int, width: int) -> float:
    """Two products of each are of a square of the lesser side with the matrix, one with itself."""
    low, high = sorted((height, width))
    return ITERATIONS * (4.0 * low**2 * high + 2.0 * low**3)
