"""Numbers of parameters that a rank keeps, computes with and learns, and the bytes of a number.

Weights, gradients and moments are fp32 (4 bytes); the arithmetic may be of 2.
"""

from dataclasses import dataclass

from atoll.plan.adapters import PACKED_BYTES, staying
from atoll.plan.shapes import Shape
from atoll.settings import Run

FP32, BF16 = 4, 2


def compute_bytes(run: Run) -> int:
    """Bytes of a number in the arithmetic: auto is bf16 on devices, fp32 on processors."""
    defaults_to_fp32 = run.precision.compute == "auto" and run.facility.node.device == "cpu"
    return FP32 if run.precision.compute == "fp32" or defaults_to_fp32 else 2


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters on a rank: what it keeps, what it computes with, what learns."""

    layers: int
    shards: int
    block: float  # of one block that a rank computes
    block_bytes: float  # of the same, as it is gathered
    rest: float  # outside the blocks
    own: float
    own_bytes: float
    cast: float  # those that autocast has a copy of
    learning_block: float
    learning_rest: float
    learning: float  # of its own
    largest: float

    @property
    def block_and_rest(self) -> float:
        return self.layers * self.block + self.rest


def weights_of(run: Run, shape: Shape, stage: int) -> Weights:
    """Of a rank of that stage; adapters alone learn where there are some."""
    axes, parts = run.axes, staying(run, shape)
    shards = 1 if "fsdp" not in run.sharding.layouts else axes.shard * axes.context
    layers = -(-shape.layers // axes.pipeline)
    added = (0, 0) if parts is None else (parts.block, parts.rest)
    whole_block = _block_parameters(shape, axes.tensor) + added[0]
    # that a rank computes
    block = whole_block - shape.expert_parameters * (1 - 1 / axes.expert)
    rest = _rest_parameters(shape, stage, axes.pipeline) + added[1]
    own = layers * whole_block / shards + rest / (shards * axes.tensor)
    learning = own if parts is None else (layers * added[0] + added[1]) / shards
    stored, packed = (0, 0.0) if parts is None else (parts.stored, parts.stored_bytes)
    # of 4-bit weights the bytes are divided; their scales are whole on every rank
    packed -= stored * PACKED_BYTES * (1 - 1 / shards)
    return Weights(
        layers=layers,
        shards=shards,
        block=block,
        block_bytes=(block - stored) * compute_bytes(run) + stored * PACKED_BYTES,
        rest=rest,
        own=own,
        own_bytes=(own - layers * stored / shards) * FP32 + layers * packed,
        cast=layers * (block - stored) + rest,
        learning_block=block if parts is None else added[0],
        learning_rest=rest if parts is None else added[1],
        learning=learning,
        largest=max(whole_block, shape.head_parameters),
    )


def _block_parameters(shape: Shape, tensor: int) -> float:
    matrices = shape.block_parameters - shape.block_vectors
    return matrices / tensor + shape.block_vectors


def _rest_parameters(shape: Shape, stage: int, stages: int) -> float:
    if stages == 1:
        return shape.rest_parameters
    ends = {0: shape.head_parameters, stages - 1: shape.head_parameters}
    return ends.get(stage, 0)
