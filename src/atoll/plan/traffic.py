"""Bytes that ranks send each other in a step, in closed form, by kind of collective.

Rings (Thakur et al. 2005): a gather or a reduce-scatter of n bytes over r ranks sends n (r-1)/r
from each rank, an all-reduce twice that; an all-to-all n (r-1)/r. Gloo, which processors use, makes
a reduce-scatter of an all-reduce.

A layout or an exchange that is not in FORMULAS trains as any other; what it sends is unknown.
"""

from collections.abc import Callable, Mapping

from atoll.plan.adapters import PACKED_BYTES, adapter_parameters, staying
from atoll.plan.shapes import Shape
from atoll.plan.weights import BF16, FP32, compute_bytes
from atoll.plan.zero import stage_of
from atoll.settings import Run, Sharding

Sent = Mapping[str, float | None]  # bytes by what they are for; None: unknown


def bytes_sent(run: Run, shape: Shape) -> Sent:
    """What an average rank sends in a step, by what it is for."""
    if run.world_size == 1:
        return {}
    sent: dict[str, float | None] = {}
    if run.sharding.engine == "deepspeed":
        return _zero(run, shape)
    for name in _spread_by(run.sharding) or ["ddp"]:
        formula = FORMULAS.get(name)
        sent |= {"gradients": None} if formula is None else formula(run, shape)
    return sent | _within_samples(run, shape)


def total(sent: Sent) -> float | None:
    """The bytes of all kinds together; None where one of them is unknown."""
    known = [size for size in sent.values() if size is not None]
    return sum(known) if len(known) == len(sent) else None


def rounded(sent: Sent) -> dict[str, int | None]:
    """In whole bytes, for a record."""
    return {kind: None if size is None else round(size) for kind, size in sent.items()}


def is_known(sharding: Sharding) -> bool:
    """Whether what the strategy sends has a formula here."""
    return set(_spread_by(sharding)) <= FORMULAS.keys()


def ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _spread_by(sharding: Sharding) -> list[str]:
    return [*sharding.layouts, *([sharding.exchange] if sharding.exchange else [])]


def _copies(run: Run, shape: Shape) -> dict[str, float]:
    """By hand once in a step; all to the first rank and the mean back is as much, on average."""
    often = run.sharding.sync_every_microbatch and run.sharding.exchange is None
    exchanges = run.microbatches if often else 1
    learning = shape.parameters if run.model.lora is None else adapter_parameters(run, shape)
    return {"gradients": 2 * ring(run.world_size) * FP32 * learning * exchanges}


def _zero(run: Run, shape: Shape) -> dict[str, float]:
    """DeepSpeed's stages: all of it in the arithmetic's numbers, in every pass from stage 2 on.

    Stages 1 and 2 average whole buckets and keep their part, unless they are told otherwise.
    """
    stage, passes = stage_of(run.sharding.deepspeed), run.microbatches
    stated = (run.sharding.deepspeed or {}).get("zero_optimization", {})
    whole = stage < 3 and stated.get("use_multi_rank_bucket_allreduce", True)
    once = ring(run.world_size) * compute_bytes(run) * shape.parameters
    gathers = 2 * passes if stage == 3 else 1
    scatters = passes if stage >= 2 else 1
    return {"parameters": gathers * once, "gradients": (1 + whole) * scatters * once}


def _sharded(run: Run, shape: Shape) -> dict[str, float]:
    """Gathered parameters, scattered gradients, and copies of shards averaged (HSDP)."""
    axes, sharding, c = run.axes, run.sharding, compute_bytes(run)
    shards, passes = axes.shard * axes.context, run.microbatches
    blocks, experts, rest = _own_parameters(run, shape)
    once = ring(shards) * blocks + ring(shards // axes.expert) * experts
    gathers = 2  # of a block's parameters: for its forward pass, and for its backward pass
    if sharding.reshard_after_forward is False:
        gathers = passes = 1
    scatters = run.microbatches if sharding.sync_every_microbatch else 1
    scatter = 2 if run.facility.node.device == "cpu" else 1
    rest_ring = ring(shards * axes.tensor)
    learning = once + rest_ring * rest
    if (parts := staying(run, shape)) is not None:  # these go with no axis but shards and copies
        layers = shape.layers / axes.pipeline
        once, rest = once + ring(shards) * layers * parts.block, rest + parts.rest
        learning = ring(shards) * _copied(run, shape)
        once -= ring(shards) * layers * parts.stored * (1 - PACKED_BYTES / c)  # as their bytes
    gathered = passes * c * (gathers * once + rest_ring * rest)
    if run.optimizer.name == "muon":  # each rank orthogonalises whole matrices, in bf16
        matrices = shape.layers / axes.pipeline * shape.block_matrices
        gathered += rest_ring * matrices * BF16
        if axes.expert > 1:  # else a rank has some of them whole
            gathered += ring(shards // axes.expert) * experts * BF16
    return {
        "parameters": gathered,
        "gradients": scatter * scatters * FP32 * learning + shards_averaged(run, shape),
    }


def shards_averaged(run: Run, shape: Shape) -> float:
    """Of the gradients' bytes, those that average a shard's copies, once in a step (HSDP)."""
    axes = run.axes
    own = _copied(run, shape) / (axes.shard * axes.context)
    return 2 * ring(axes.replicate) * FP32 * own


def _copied(run: Run, shape: Shape) -> float:
    """What learns of a rank's stage and tensor part, before sharding."""
    if (parts := staying(run, shape)) is not None:
        return shape.layers / run.axes.pipeline * parts.block + parts.rest
    blocks, experts, rest = _own_parameters(run, shape)
    return blocks + experts * run.axes.expert + rest


def _own_parameters(run: Run, shape: Shape) -> tuple[float, float, float]:
    """Of a rank's stage and tensor part, before sharding: blocks, experts, what is in no block."""
    axes = run.axes
    layers, vectors = shape.layers / axes.pipeline, shape.block_vectors
    matrices = shape.block_parameters - vectors - shape.expert_parameters
    blocks = layers * (matrices / axes.tensor + vectors)
    experts = layers * shape.expert_parameters / axes.tensor / axes.expert
    # the ends of a pipeline have what is in no block, each about half of it
    return blocks, experts, shape.rest_parameters / axes.pipeline


# layout or exchange -> what is sent for the parameters and their gradients
FORMULAS: dict[str, Callable[[Run, Shape], dict[str, float]]] = {
    "fsdp": _sharded,
    "ddp": _copies,
    "all_reduce": _copies,
    "gather_scatter": _copies,
}


def _within_samples(run: Run, shape: Shape) -> dict[str, float]:
    """Hidden states between tensor, expert and stages' ranks, heads between context ranks."""
    axes, c, passes = run.axes, compute_bytes(run), run.microbatches
    tokens = run.training.microbatch_samples * run.data.sequence_tokens
    layers = shape.layers / axes.pipeline
    hidden = tokens / axes.context * shape.hidden * c
    forwards = 1 if run.training.activation_checkpointing == "none" else 2
    sent = {}
    if axes.tensor > 1:
        # two gathers and two scatters a layer in each direction
        sent["tensor"] = passes * layers * 4 * (1 + forwards) * ring(axes.tensor) * hidden
    if axes.context > 1:
        heads = (2 * shape.query_width + 2 * shape.kv_width) / shape.hidden / axes.tensor
        sent["context"] = passes * layers * heads * (1 + forwards) * ring(axes.context) * hidden
    if axes.expert > 1:
        # to a token's experts and back, of tokens that go to all of them alike
        rows = 2 * shape.active_experts * hidden
        sent["expert"] = passes * layers * (1 + forwards) * ring(axes.expert) * rows
    if axes.pipeline > 1:
        stages = axes.pipeline * run.sharding.stages_per_rank
        sent["pipeline"] = passes * 2 * (stages - 1) / axes.pipeline * hidden / axes.tensor
        if shape.tied:  # the first and the last stage add up the gradients of one embedding
            shards = axes.shard * axes.context * axes.tensor
            sent["pipeline"] += 2 / axes.pipeline * FP32 * shape.head_parameters / shards
    return sent
