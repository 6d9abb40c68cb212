"""How many messages follow one another in a step, by what they are for: each takes its latency.

In a ring of r ranks a gather, a reduce-scatter or an all-to-all passes r - 1 messages on, an
all-reduce twice that. NCCL may take a tree of fewer: the count is that of rings, as the bytes are.
"""

from collections.abc import Mapping

from atoll.plan.adapters import adapter_parameters
from atoll.plan.shapes import Shape, family_of
from atoll.plan.weights import FP32
from atoll.settings import Run

BUCKET_BYTES = 25 * 2**20  # what torch's DDP reduces at once
TENSORS = {True: 9, False: 16}  # of a block: seven matrices and two norms, or with biases


def messages_sent(run: Run, shape: Shape) -> Mapping[str, float]:
    """Of an average rank in a step; `copies` are the averages of copied shards."""
    if run.world_size == 1:
        return {}
    sharded = "fsdp" in run.sharding.layouts
    spread = _sharded(run, shape) if sharded else _copies(run, shape)
    return spread | _within_samples(run, shape)


def _copies(run: Run, shape: Shape) -> dict[str, float]:
    """An all-reduce for each of DDP's buckets; by hand, for each tensor."""
    learning = shape.parameters if run.model.lora is None else adapter_parameters(run, shape)
    calls = max(1.0, -(-FP32 * learning // BUCKET_BYTES))
    if run.sharding.exchange is not None:
        calls = shape.layers * TENSORS[family_of(shape.family).gated] + 2
    often = run.sharding.sync_every_microbatch and run.sharding.exchange is None
    exchanges = run.microbatches if often else 1
    return {"gradients": 2 * (run.world_size - 1) * calls * exchanges}


def gathers(run: Run, shape: Shape) -> float:
    """Of FSDP in a step: one for each block's forward and backward pass, and one for the rest."""
    if "fsdp" not in run.sharding.layouts:
        return 0.0
    blocks = shape.layers / run.axes.pipeline
    if run.sharding.reshard_after_forward is False:
        return blocks + 1
    return run.microbatches * (2 * blocks + 1)


def _sharded(run: Run, shape: Shape) -> dict[str, float]:
    """What is gathered, then scatters."""
    axes, sharding = run.axes, run.sharding
    around, blocks = axes.shard * axes.context - 1, shape.layers / axes.pipeline
    scatters = run.microbatches if sharding.sync_every_microbatch else 1
    scatter = 2 if run.facility.node.device == "cpu" else 1
    return {
        "parameters": gathers(run, shape) * around,
        "gradients": scatter * scatters * (blocks + 1) * around,
        "copies": 2 * (blocks + 1) * (axes.replicate - 1),
    }


def _within_samples(run: Run, shape: Shape) -> dict[str, float]:
    axes = run.axes
    forwards = 1 if run.training.activation_checkpointing == "none" else 2
    in_layers = run.microbatches * shape.layers / axes.pipeline * (1 + forwards)
    stages = axes.pipeline * run.sharding.stages_per_rank
    return {
        "tensor": in_layers * 4 * (axes.tensor - 1),
        "context": in_layers * 4 * (axes.context - 1),  # queries, keys, values, and what comes back
        "expert": in_layers * 2 * (axes.expert - 1),
        "pipeline": run.microbatches * 2 * (stages - 1) / axes.pipeline,
    }
