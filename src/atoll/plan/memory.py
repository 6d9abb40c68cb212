"""Bytes that one device needs to train, term by term, in closed form.

Weights, gradients and moments are fp32 (4 bytes).
"""

from dataclasses import dataclass, replace

from atoll.plan.activations import (
    block_activations,
    kept_activations,
    logits_bytes,
    microbatches_in_flight,
)
from atoll.plan.adapters import staying, unknown_targets
from atoll.plan.evaluation import forward_bytes, scoring_bytes
from atoll.plan.heap import gathered_in_heap, heap_of
from atoll.plan.shapes import FAMILIES, Shape
from atoll.plan.traffic import is_known
from atoll.plan.weights import BF16, FP32, Weights, compute_bytes, weights_of
from atoll.plan.zero import RUNTIME_GIB as DEEPSPEED_RUNTIME_GIB
from atoll.plan.zero import is_on_disk, zero_parts
from atoll.settings import Run

# of both moments; of 8 bits, blocks of 256 have a scale
MOMENT_BYTES = {"adamw": 8.0, "muon": 8.0, "adamw_8bit": 2.03}
# What a process has before it has a model: measured for torch and transformers on a processor;
# a device's context and its libraries' workspaces are not the allocator's, and not counted.
RUNTIME_GIB = {"cpu": 0.35}
HARNESS_RUNTIME_GIB = 0.16  # of lm-evaluation-harness, from the first evaluation on
BF16_RUNTIME_GIB = 0.035  # oneDNN's products in bf16, which are compiled where they run
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
    scoring: int  # the peak while tasks are scored; 0: none are
    checkpoint: int  # the copy of the state that is being saved, in the node's memory
    host: int  # what offload puts into the node's memory, for each device
    peak: int  # of a step
    needed: int  # of the run, with its loading, saves, scores and export
    heap: int  # what a step leaves free in the heap beside its peak, on processors

    @property
    def peak_gib(self) -> float:
        return self.peak / 2**30

    @property
    def whole(self) -> int:
        """What a process of the run holds at the most."""
        return max(self.needed, self.peak + self.heap)

    @property
    def whole_gib(self) -> float:
        return self.whole / 2**30


def memory_of(run: Run, shape: Shape) -> Memory:
    """The need of a run's fullest device; of one without steps, that of its evaluation."""
    if run.sharding.engine == "deepspeed":
        return _of_deepspeed(run, shape)
    of_stage = _of_stage if run.training.steps != 0 else _of_evaluation
    stages = [of_stage(run, shape, stage) for stage in {0, run.sharding.pipeline - 1}]
    return max(stages, key=lambda memory: memory.peak)


def why_unknown(run: Run, shape: Shape) -> str:
    """Why no formula here holds for a run, or nothing; such a run is never chosen."""
    if is_on_disk(run.sharding.deepspeed):
        return "what DeepSpeed holds of its files on disk has no formula"
    if run.optimizer.name not in MOMENT_BYTES:
        return f"what optimizer={run.optimizer.name} keeps has no formula"
    if run.sharding.layouts and not is_known(run.sharding):
        return f"what sharding={run.sharding.name} keeps has no formula"
    if shape.experts and shape.family not in FAMILIES:  # how wide, and what is beside them
        return f"the experts of {shape.family} have no formula"
    if names := unknown_targets(run, shape):
        return f"model.lora.targets names {names[0]}, which is none of {shape.family}'s layers here"
    return ""


def _of_stage(run: Run, shape: Shape, stage: int) -> Memory:
    sharding, axes = run.sharding, run.axes
    w, runtime = weights_of(run, shape, stage), _runtime(run)
    in_flight = microbatches_in_flight(
        axes.pipeline, sharding.stages_per_rank, run.microbatches, stage
    )
    kept = kept_activations(run, shape, w.layers * in_flight)
    logits = logits_bytes(run, shape) if stage == axes.pipeline - 1 else 0
    moments, gradients = _moments(run, shape, w), w.learning * FP32
    state = w.own_bytes + moments + _copies(run, w)
    waiting, buffers = _waiting(run, w)
    gathered = _gathered(run, w)
    activations = kept[run.training.activation_checkpointing]
    at_most = _highest(run, shape, w, in_flight, activations, logits)
    peak = runtime + (0 if _offloads(run) else state) + gathered + at_most
    heap = heap_of(run, shape, kept, logits)
    if "fsdp" in sharding.layouts:
        heap += gathered_in_heap(run, w, buffers)
    if "ddp" in sharding.layouts:
        peak = max(peak, runtime + w.own_bytes + min(w.own_bytes, DDP_BROADCAST_BYTES))
    on_processors = run.facility.node.device == "cpu"
    saved = w.learning * FP32 + moments + bool(run.optimizer.ema_decay) * w.learning * FP32
    export = state + shape.head_parameters * FP32 + on_processors * _file_bytes(run, shape)
    loading = w.own_bytes + w.largest * FP32
    scoring = _scoring(run, shape, w, state)
    needed = max(peak, runtime + max(loading, export, scoring, state + on_processors * saved))
    if on_processors and _saves_between(run):  # the copy is made beside the next step
        needed = max(needed, peak + saved)
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
        scoring=round(scoring),
        checkpoint=round(saved),
        host=round(state + gradients if _offloads(run) else 0),
        peak=round(peak),
        needed=round(needed),
        heap=round(heap),
    )


def _of_evaluation(run: Run, shape: Shape, stage: int) -> Memory:
    """Of a run without steps: no gradients or moments, and passes that keep nothing."""
    w, trained = weights_of(run, shape, stage), _of_stage(run, shape, stage)
    copies = _copies(run, w)
    state, forward = w.own_bytes + copies, forward_bytes(run, shape, stage)
    on_device = 0 if _offloads(run) else state
    # whose buckets are there before the first gradient; on processors, untouched
    is_copied, on_processors = "ddp" in run.sharding.layouts, run.facility.node.device == "cpu"
    buckets = is_copied * (not on_processors) * w.learning * FP32
    peak = trained.runtime + on_device + buckets + trained.gathered + forward
    if is_copied:
        first = w.own_bytes + min(w.own_bytes, DDP_BROADCAST_BYTES)
        peak = max(peak, trained.runtime + first)
    export = run.export.untrained * (trained.export - (trained.optimizer - copies))
    scoring = _scoring(run, shape, w, state)
    return replace(
        trained,
        **dict.fromkeys(("gradients", "buffers", "logits", "checkpoint", "heap"), 0),
        optimizer=round(copies),
        activations=round(forward),
        recomputed_activations=round(forward),
        export=round(export),
        scoring=round(scoring),
        host=round(state if _offloads(run) else 0),
        peak=round(peak),
        needed=round(max(peak, trained.runtime + max(trained.loading, export, scoring))),
    )


def _copies(run: Run, w: Weights) -> float:
    """The weights' average, and those the run began with."""
    return (bool(run.optimizer.ema_decay) + bool(run.optimizer.proximal)) * w.learning * FP32


def _scoring(run: Run, shape: Shape, w: Weights, state: float) -> float:
    """While tasks are scored, or nothing where none are."""
    if not run.evaluation.tasks:
        return 0
    kept = ("ddp" in run.sharding.layouts) * w.learning * FP32  # gradients, from step to step
    return (0 if _offloads(run) else state + kept) + scoring_bytes(run, shape)


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


def _kept_gradients(run: Run, reduced: float) -> float:
    """Of gradients, what is there while the last microbatch's forward pass ends.

    torch's DDP keeps their memory from step to step; what is added up before it sends anything
    lies beside that.
    """
    adds_up = run.microbatches > 1
    if "ddp" not in run.sharding.layouts:
        return reduced * adds_up
    return reduced * (1 + (adds_up and not run.sharding.sync_every_microbatch))


def _highest(
    run: Run, shape: Shape, w: Weights, in_flight: float, activations: float, logits: float
) -> float:
    """The most beside state and gathered weights, at any moment of a step."""
    parts, sharding = staying(run, shape), run.sharding
    waiting, buffers = _waiting(run, w)
    reduced = 0 if _offloads(run) else w.learning * FP32
    accumulated = _kept_gradients(run, reduced) if not waiting else 0
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
    kept = kept_activations(run, shape, shape.layers)
    activations = kept[run.training.activation_checkpointing]
    logits, runtime = logits_bytes(run, shape), _runtime(run)
    resident = zero.weights + zero.optimizer + zero.gradients - zero.host
    forward = activations + logits
    # behind the backward pass, its own part of the gradients once more, in one piece
    step = zero.buffers + c * parameters / run.world_size + block_activations(run, shape)
    peak = runtime + resident + zero.gathered + max(forward, step)
    heap = heap_of(run, shape, kept, logits)
    # parameters and moments are read whole into the node's memory, to be saved and exported
    state = 3 * FP32 * parameters
    scoring = resident + scoring_bytes(run, shape) if run.evaluation.tasks else 0
    on_processors = run.facility.node.device == "cpu"
    needed = max(peak, runtime + max(scoring, on_processors * (resident + state)))
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
        scoring=round(scoring),
        checkpoint=round(state),
        host=round(zero.host),
        peak=round(peak),
        needed=round(needed),
        heap=round(heap),
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
    more += (compute_bytes(run) == BF16) * BF16_RUNTIME_GIB
    more += bool(run.evaluation.tasks) * HARNESS_RUNTIME_GIB
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


def _file_bytes(run: Run, shape: Shape) -> float:
    size = {"float32": 4}.get(run.export.dtype, 2)
    target = shape.parameters * size / run.world_size
    return min(run.export.max_file_gib * 2**30, target)


def gibibytes(size: float) -> str:
    """A number of bytes for a table."""
    return f"{size / 2**30:.2f}" if size < 100 * 2**30 else f"{size / 2**30:.0f}"
