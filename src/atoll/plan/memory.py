"""Bytes that one device needs to train, term by term, in closed form.

Legend: N parameters, n tokens, h hidden width, i intermediate width, V vocabulary; c bytes of a
number in the arithmetic. Weights, gradients and moments are fp32 (4 bytes).
"""

from dataclasses import dataclass

from atoll.plan.shapes import Shape, family_of
from atoll.settings import Run

FP32 = 4
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03}  # of both moments; blocks of 256 have a scale
# What a process has before it has a model: measured for torch and transformers on a processor;
# a device's context and its libraries' workspaces are not the allocator's, and not counted.
RUNTIME_GIB = {"cpu": 0.35}


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, at the moment of a step that needs most."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int  # parameters of other ranks, for as long as they are needed
    buffers: int  # what collectives read and write
    activations: int
    recomputed_activations: int  # the same under training.activation_checkpointing=full
    logits: int
    runtime: int
    loading: int  # the peak while weights are read
    export: int  # the peak while the model is written
    host: int  # what offload puts into the node's memory, for each device
    peak: int

    @property
    def peak_gib(self) -> float:
        return self.peak / 2**30


def memory_of(run: Run, shape: Shape) -> Memory:
    """The need of a run's fullest device."""
    stages = [_of_stage(run, shape, stage) for stage in {0, run.sharding.pipeline - 1}]
    return max(stages, key=lambda memory: memory.peak)


def compute_bytes(run: Run) -> int:
    """Bytes of a number in the arithmetic: auto is bf16 on devices, fp32 on processors."""
    defaults_to_fp32 = run.precision.compute == "auto" and run.facility.node.device == "cpu"
    return FP32 if run.precision.compute == "fp32" or defaults_to_fp32 else 2


def microbatches_in_flight(ranks: int, per_rank: int, microbatches: int, rank: int) -> float:
    """How many microbatches' activations of all its layers a rank of a pipeline keeps at once.

    1F1B, and interleaved where a rank has several stages (Narayanan et al. 2021).
    """
    behind = ranks - rank - 1
    if per_rank > 1:
        behind = 2 * behind + (per_rank - 1) * ranks
    return min(behind + 1, microbatches * per_rank) / per_rank


def _of_stage(run: Run, shape: Shape, stage: int) -> Memory:
    sharding, axes, c = run.sharding, run.axes, compute_bytes(run)
    shards = 1 if "fsdp" not in sharding.layouts else axes.shard * axes.context
    whole_block = _block_parameters(shape, axes.tensor)
    block = whole_block - shape.expert_parameters * (1 - 1 / axes.expert)  # that a rank computes
    layers = -(-shape.layers // axes.pipeline)
    rest = _rest_parameters(shape, stage, axes.pipeline)
    own = layers * whole_block / shards + rest / (shards * axes.tensor)
    zero3 = sharding.reshard_after_forward is not False
    sharded = shards > 1 or axes.tensor > 1
    kept_blocks = (2 if zero3 else layers) if sharded else 0
    gathered = (kept_blocks * block + rest) * c if sharded else 0
    if not sharded and c < FP32:
        gathered = (layers * block + rest) * c  # autocast keeps its copies for the whole pass
    buffers = (2 * block + rest) * c + block * (FP32 + c) if sharded else 0
    gradients = own * FP32
    # between microbatches, gradients that were not exchanged yet are whole on every rank
    waits = sharded and run.microbatches > 1 and not sharding.sync_every_microbatch
    waiting = (layers * block + rest) * FP32 if waits else 0
    in_flight = microbatches_in_flight(
        axes.pipeline, run.sharding.stages_per_rank, run.microbatches, stage
    )
    block_kept = block_activations(run, shape)
    recomputed = _block_input(run, shape) * layers * in_flight + block_kept
    full = block_kept * layers * in_flight
    activations = recomputed if run.training.activation_checkpointing == "full" else full
    has_head = stage == axes.pipeline - 1
    logits = _logits(run, shape) if has_head else 0
    moments = own * MOMENT_BYTES[run.optimizer.name]
    runtime = RUNTIME_GIB.get(run.facility.node.device, 0.0) * 2**30
    average = own * FP32 if run.optimizer.ema_decay else 0
    state = own * FP32 + moments + average
    offloaded = (state + gradients) if sharding.offload else 0
    resident = 0 if sharding.offload else state
    accumulated = gradients if run.microbatches > 1 and not waits else 0
    forward_end = activations + logits + waiting + (0 if sharding.offload else accumulated)
    backward_end = (0 if sharding.offload else gradients) + block_kept + waiting + buffers
    peak = runtime + resident + gathered + max(forward_end, backward_end)
    largest = max(whole_block, shape.head_parameters)
    return Memory(
        parameters=round(own * FP32),
        gradients=round(gradients + waiting),
        optimizer=round(moments + average),
        gathered=round(gathered),
        buffers=round(buffers),
        activations=round(full),
        recomputed_activations=round(recomputed),
        logits=round(logits),
        runtime=round(runtime),
        loading=round(own * FP32 + largest * FP32),
        export=round(state + shape.head_parameters * FP32 + _file_bytes(run, shape)),
        host=round(offloaded),
        peak=round(peak),
    )


def block_activations(run: Run, shape: Shape) -> float:
    """What one block keeps for one microbatch's backward pass, without activation checkpointing."""
    c, tensor = compute_bytes(run), run.axes.tensor
    all_tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.context
    own_tokens, h, i = all_tokens / tensor, shape.hidden, shape.expert_width
    gathered = 2 * h * c * all_tokens if tensor > 1 else 0
    if run.axes.expert > 1:  # hidden states as they come to the experts, and as they come back
        gathered += 2 * h * c * all_tokens * shape.active_experts
    # queries, keys, values; what attention gives, and the same put together from its segments
    attention = (h + 2 * shape.query_width + 2 * shape.kv_width) * c + FP32 * shape.heads
    if family_of(shape.family).gated:
        # each norm keeps its input in fp32, and that normalised, before and after its weight
        norms, mlp = 2 * (FP32 + 2 * c) * h, 4 * i * c * max(1, shape.active_experts)
    else:
        norms, mlp = 4 * h * c, ACTIVATION_COPIES.get(shape.family, 2) * i * c
    return norms * own_tokens + (attention + mlp) * all_tokens / tensor + gathered


# How many times the intermediate width a family's activation function keeps: ReLU its result,
# GELU its input too; GPT-2's is written out, and its products keep what they multiply: the input,
# half of it, the tanh, one more than that, and the result.
ACTIVATION_COPIES = {"gpt2": 5, "opt": 1, "bert": 2}


def _block_parameters(shape: Shape, tensor: int) -> float:
    matrices = shape.block_parameters - shape.block_vectors
    return matrices / tensor + shape.block_vectors


def _rest_parameters(shape: Shape, stage: int, stages: int) -> float:
    if stages == 1:
        return shape.rest_parameters
    ends = {0: shape.head_parameters, stages - 1: shape.head_parameters}
    return ends.get(stage, 0)


def _block_input(run: Run, shape: Shape) -> float:
    tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.tokens
    return tokens * shape.hidden * compute_bytes(run)


def _logits(run: Run, shape: Shape) -> float:
    """A chunk's logits and probabilities, and the head's gradient, which is whole at once."""
    c, tokens = compute_bytes(run), run.training.loss_chunk_tokens
    all_tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.tokens
    chunk = min(tokens, all_tokens) * shape.vocabulary * (c + FP32 + (c if c < FP32 else 0))
    return chunk + shape.head_parameters * FP32 + all_tokens * shape.hidden * c


def _file_bytes(run: Run, shape: Shape) -> float:
    size = {"float32": 4}.get(run.export.dtype, 2)
    target = shape.parameters * size / run.world_size
    return min(run.export.max_file_gib * 2**30, target)


def gibibytes(size: float) -> str:
    """A number of bytes for a table."""
    return f"{size / 2**30:.2f}" if size < 100 * 2**30 else f"{size / 2**30:.0f}"
