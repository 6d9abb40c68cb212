"""Bytes that one device needs to train, term by term, in closed form.

Legend: N parameters, n tokens, h hidden width, i intermediate width, V vocabulary; c bytes of a
number in the arithmetic. Weights, gradients and moments are fp32 (4 bytes).
"""

from dataclasses import dataclass

from atoll.plan.adapters import PACKED_BYTES, Staying, staying, unknown_targets
from atoll.plan.shapes import Shape, family_of
from atoll.plan.zero import RUNTIME_GIB as DEEPSPEED_RUNTIME_GIB
from atoll.plan.zero import is_on_disk, zero_parts
from atoll.settings import Run

FP32, BF16 = 4, 2
# of both moments; of 8 bits, blocks of 256 have a scale
MOMENT_BYTES = {"adamw": 8.0, "muon": 8.0, "adamw_8bit": 2.03}
# What a process has before it has a model: measured for torch and transformers on a processor;
# a device's context and its libraries' workspaces are not the allocator's, and not counted.
RUNTIME_GIB = {"cpu": 0.35}
# peft and bitsandbytes beside them, and what bitsandbytes' step on a processor holds of the largest
# tensor: both moments, the gradient, and the denominator while it is made, all in fp32.
ADAPTER_RUNTIME_GIB, BITSANDBYTES_RUNTIME_GIB = 0.054, 0.045
STEP_COPIES_8BIT = 5
DDP_BROADCAST_BYTES = 250 * 2**20  # what torch's DDP makes one tensor of, as it begins


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
    checkpoint: int  # the copy of the state that is being saved, in the node's memory
    host: int  # what offload puts into the node's memory, for each device
    peak: int  # of a step
    whole: int  # of the run, with its loading, saves and export

    @property
    def peak_gib(self) -> float:
        return self.peak / 2**30

    @property
    def whole_gib(self) -> float:
        return self.whole / 2**30


def memory_of(run: Run, shape: Shape) -> Memory:
    """The need of a run's fullest device."""
    if run.sharding.engine == "deepspeed":
        return _of_deepspeed(run, shape)
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


def why_unknown(run: Run, shape: Shape) -> str:
    """Why no formula here holds for a run, or nothing; such a run is never chosen."""
    if is_on_disk(run.sharding.deepspeed):
        return "what DeepSpeed holds of its files on disk has no formula"
    if run.optimizer.name not in MOMENT_BYTES:
        return f"what optimizer={run.optimizer.name} keeps has no formula"
    if names := unknown_targets(run, shape):
        return f"model.lora.targets names {names[0]}, which is none of {shape.family}'s layers here"
    return ""


def _of_stage(run: Run, shape: Shape, stage: int) -> Memory:
    sharding, axes = run.sharding, run.axes
    w, runtime = weights_of(run, shape, stage), _runtime(run)
    in_flight = microbatches_in_flight(
        axes.pipeline, sharding.stages_per_rank, run.microbatches, stage
    )
    kept = _kept_activations(run, shape, w.layers * in_flight)
    logits = _logits(run, shape) if stage == axes.pipeline - 1 else 0
    moments, gradients = _moments(run, shape, w), w.learning * FP32
    # the weights' average, and those the run began with
    copies = bool(run.optimizer.ema_decay) + bool(run.optimizer.proximal)
    state = w.own_bytes + moments + copies * w.learning * FP32
    waiting, buffers = _waiting(run, w)
    gathered = _gathered(run, w)
    activations = kept[run.training.activation_checkpointing]
    at_most = _highest(run, shape, w, in_flight, activations, logits)
    peak = runtime + (0 if _offloads(run) else state) + gathered + at_most
    if "ddp" in sharding.layouts:
        peak = max(peak, runtime + w.own_bytes + min(w.own_bytes, DDP_BROADCAST_BYTES))
    on_processors = run.facility.node.device == "cpu"
    saved = w.learning * FP32 + moments + bool(run.optimizer.ema_decay) * w.learning * FP32
    export = state + shape.head_parameters * FP32 + on_processors * _file_bytes(run, shape)
    loading = w.own_bytes + w.largest * FP32
    whole = max(peak, runtime + max(loading, export, state + on_processors * saved))
    if on_processors and _saves_between(run):  # the copy is made beside the next step
        whole = max(whole, peak + saved)
    return Memory(
        parameters=round(w.own_bytes),
        gradients=round(gradients + waiting),
        optimizer=round(state - w.own_bytes),
        gathered=round(gathered),
        buffers=round(buffers),
        activations=round(kept["none"]),
        recomputed_activations=round(kept["full"]),
        logits=round(logits),
        runtime=round(runtime),
        loading=round(loading),
        export=round(export),
        checkpoint=round(saved),
        host=round(state + gradients if _offloads(run) else 0),
        peak=round(peak),
        whole=round(whole),
    )


def _kept_activations(run: Run, shape: Shape, blocks: float) -> dict[str, float]:
    """For the backward pass of so many blocks, by what is recomputed."""
    block, entrance = block_activations(run, shape), _block_input(run, shape)
    recomputed = entrance * blocks + block
    selective = recomputed + attention_results(run, shape) * blocks
    return {"none": block * blocks, "selective": selective, "full": recomputed}


def _gathered(run: Run, w: Weights) -> float:
    """Weights as they are computed with; FSDP has memory of its own for them, of one rank too."""
    if "fsdp" not in run.sharding.layouts:  # autocast keeps its copies for the whole pass
        return w.cast * compute_bytes(run) if compute_bytes(run) < FP32 else 0
    blocks = w.layers if run.sharding.reshard_after_forward is False else 2
    return blocks * w.block_bytes + w.rest * compute_bytes(run)


def _waiting(run: Run, w: Weights) -> tuple[float, float]:
    """Whole gradients of earlier microbatches, and what is beside them on its way.

    A block's gradients and their copy to be scattered; the root's, whole until the pass ends.
    """
    if "fsdp" not in run.sharding.layouts:
        return 0, 0
    if run.microbatches > 1 and not run.sharding.sync_every_microbatch:
        whole = (w.layers * w.learning_block + w.learning_rest) * FP32
        return whole, w.learning_block * FP32
    return 0, w.learning_block * (FP32 + compute_bytes(run)) + w.learning_rest * FP32


def _highest(
    run: Run, shape: Shape, w: Weights, in_flight: float, activations: float, logits: float
) -> float:
    """The most beside state and gathered weights, at any moment of a step."""
    parts, sharding = staying(run, shape), run.sharding
    waiting, buffers = _waiting(run, w)
    reduced = 0 if _offloads(run) else w.learning * FP32
    accumulated = reduced if run.microbatches > 1 and not waiting else 0
    # where all microbatches are under way at once, none has gradients until one of them is done
    at_once = bool(waiting) and in_flight >= run.microbatches
    beside = activations * (1 - 1 / in_flight) if at_once else activations
    forward_end = max(activations + accumulated, beside + waiting) + logits
    # a block's whole gradients go as its own part of them comes
    backward_end = max(reduced, waiting) + block_activations(run, shape) + buffers
    if "fsdp" in sharding.layouts and sharding.reshard_after_forward is False:
        backward_end -= (w.layers - 1) * w.block_bytes  # which go as their backward pass is done
    unpacked = 0 if parts is None else parts.largest * compute_bytes(run)
    backward = max(beside + waiting + buffers, backward_end) + unpacked
    return max(forward_end, backward, reduced + _step_copies(run, shape, w))


def _of_deepspeed(run: Run, shape: Shape) -> Memory:
    """Under DeepSpeed's engine, which makes its buffers as the backward pass fills them."""
    c, parameters = compute_bytes(run), float(shape.parameters)
    words = run.sharding.deepspeed
    zero = zero_parts(words, parameters, run.world_size, c, _offloads(run))
    kept = _kept_activations(run, shape, shape.layers)
    logits, runtime = _logits(run, shape), _runtime(run)
    resident = zero.weights + zero.optimizer + zero.gradients - zero.host
    forward = kept[run.training.activation_checkpointing] + logits
    # behind the backward pass, its own part of the gradients once more, in one piece
    step = zero.buffers + c * parameters / run.world_size + block_activations(run, shape)
    peak = runtime + resident + zero.gathered + max(forward, step)
    # parameters and moments are read whole, to be saved and exported
    state = 3 * FP32 * parameters
    whole = max(peak, runtime + resident + state) if run.facility.node.device == "cpu" else peak
    return Memory(
        parameters=round(zero.weights),
        gradients=round(zero.gradients),
        optimizer=round(zero.optimizer),
        gathered=round(zero.gathered),
        buffers=round(zero.buffers),
        activations=round(kept["none"]),
        recomputed_activations=round(kept["full"]),
        logits=round(logits),
        runtime=round(runtime),
        loading=round(FP32 * parameters),
        export=round(resident + FP32 * parameters),
        checkpoint=round(state),
        host=round(zero.host),
        peak=round(peak),
        whole=round(whole),
    )


def _offloads(run: Run) -> bool:
    """Whether state leaves the device: ranks on processors have one memory for both."""
    return run.sharding.offload and run.facility.node.device != "cpu"


def _saves_between(run: Run) -> bool:
    """Whether a checkpoint is followed by more steps."""
    every, steps = run.checkpoint.every_steps, run.training.steps
    return every == "auto" or (every > 0 and (steps is None or steps > every))


def _runtime(run: Run) -> float:
    """What the process and its libraries take before there is a model."""
    if run.facility.node.device not in RUNTIME_GIB:
        return 0
    eight_bit = run.optimizer.name == "adamw_8bit"
    more = ADAPTER_RUNTIME_GIB if run.model.lora else eight_bit * BITSANDBYTES_RUNTIME_GIB
    more += (run.sharding.engine == "deepspeed") * DEEPSPEED_RUNTIME_GIB
    return (RUNTIME_GIB[run.facility.node.device] + more) * 2**30


def _moments(run: Run, shape: Shape, w: Weights) -> float:
    """What the optimizer keeps of its own parameters; Muon one of a matrix, where AdamW has two."""
    every = w.learning * MOMENT_BYTES.get(run.optimizer.name, 8.0)
    if run.optimizer.name != "muon":
        return every
    matrices = shape.block_matrices / run.axes.tensor + shape.expert_parameters
    return every - FP32 * w.layers * matrices / w.shards


def _step_copies(run: Run, shape: Shape, w: Weights) -> float:
    """What the optimizer makes of one tensor at a time; on devices its kernels need nothing."""
    if run.optimizer.name == "muon":  # a whole matrix in bf16 and its products, the update too
        # of a mixture, all of a tensor's experts that a rank has
        experts = 2 * shape.expert_width * shape.experts / w.shards if shape.experts else 0
        return 5 * BF16 * shape.hidden * max(shape.intermediate, shape.query_width, experts)
    if run.optimizer.name != "adamw_8bit" or run.facility.node.device != "cpu":
        return 0
    largest = max(shape.head_parameters, shape.hidden * shape.intermediate)
    if run.model.lora is not None:
        largest = run.model.lora.rank * max(shape.hidden, shape.intermediate)
    return STEP_COPIES_8BIT * FP32 * largest / w.shards


def block_activations(run: Run, shape: Shape) -> float:
    """What one block keeps for one microbatch's backward pass, without activation checkpointing."""
    c, tensor, parts = compute_bytes(run), run.axes.tensor, staying(run, shape)
    all_tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.context
    own_tokens, h, i = all_tokens / tensor, shape.hidden, shape.expert_width
    gathered = 2 * h * c * all_tokens if tensor > 1 else 0
    if run.axes.expert > 1:  # hidden states as they come to the experts, and as they come back
        gathered += 2 * h * c * all_tokens * shape.active_experts
    # queries, keys, values; what attention gives, and the same put together from its segments
    attention = (3 * shape.query_width + 2 * shape.kv_width) * c + FP32 * shape.heads
    if family_of(shape.family).gated:
        # each norm keeps its input in fp32, and that normalised, before and after its weight
        norms, mlp = 2 * (FP32 + 2 * c) * h, 4 * i * c * max(1, shape.active_experts)
    else:
        norms, mlp = 4 * h * c, ACTIVATION_COPIES.get(shape.family, 2) * i * c
    if parts is not None:
        normalised = 2 * h * c if family_of(shape.family).gated else 0  # for the norms' weights
        norms -= normalised + _unread(parts, {"attention": h, "mlp": h}) * c
        attention -= _unread(parts, {"joined": shape.query_width}) * c
        products = i * max(1, shape.active_experts)
        if shape.family == "opt":  # ReLU keeps its result in any case
            products = 0
        mlp += (parts.kept - _unread(parts, {"product": products})) * c
    return norms * own_tokens + (attention + mlp) * all_tokens / tensor + gathered


def attention_results(run: Run, shape: Shape) -> float:
    """What attention gives in one block, and its normalisers: kept by selective recompute."""
    tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.tokens
    return tokens * (shape.query_width * compute_bytes(run) + shape.heads * FP32)


def _unread(parts: Staying, widths: dict[str, int]) -> int:
    """Of what a block's linear layers read, the widths that no adapter needs again."""
    return sum(width for name, width in widths.items() if name not in parts.reads)


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
    numbers = min(tokens, all_tokens) * shape.vocabulary
    head = (run.model.lora is None) * shape.head_parameters * FP32
    if run.task.name == "preference":
        # computed again in the backward pass: logits, and three such while theirs are made; each
        # chunk's gradient of the head is whole, and added to those before
        return numbers * (c + 3 * FP32) + head * (1 + (all_tokens > tokens))
    # of the chunk before, the probabilities are there until this one's are
    before = FP32 * (all_tokens > tokens)
    chunk = numbers * (c + FP32 + (c if c < FP32 else 0) + before)
    return chunk + head + all_tokens * shape.hidden * c


def _file_bytes(run: Run, shape: Shape) -> float:
    size = {"float32": 4}.get(run.export.dtype, 2)
    target = shape.parameters * size / run.world_size
    return min(run.export.max_file_gib * 2**30, target)


def gibibytes(size: float) -> str:
    """A number of bytes for a table."""
    return f"{size / 2**30:.2f}" if size < 100 * 2**30 else f"{size / 2**30:.0f}"
