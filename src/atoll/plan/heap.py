"""What a processor's heap keeps of freed memory, beside what a step has in use."""

from atoll.plan.shapes import Shape
from atoll.plan.weights import FP32, Weights, compute_bytes
from atoll.settings import Run

# On processors glibc's heap keeps what is freed between blocks in use; what is larger than
# HEAP_BLOCK_BYTES never lies in it (mallopt(3), M_MMAP_THRESHOLD). The shares were fitted on the
# runs with a plain heap of benchmarks/memory_cases.py: of what a step keeps that recomputes
# nothing, for one that does not, one that recomputes, one with adapters; of the blocks that FSDP
# gathers, for each pass that does; and of what else it gathers, and scatters.
HEAP_BLOCK_BYTES = 32 * 2**20
KEPT, KEPT_RECOMPUTING, KEPT_ADAPTED = 0.5, 0.4, 0.95
KEPT_GATHERED, KEPT_REST = 1.2, 2.0


def heap_of(run: Run, shape: Shape, kept: dict[str, float], logits: float) -> float:
    """What a processor's heap keeps of activations and logits, beside those in use."""
    share = KEPT if run.training.activation_checkpointing == "none" else KEPT_RECOMPUTING
    share = KEPT_ADAPTED if run.model.lora is not None else share
    return share * _small_blocks(run, shape, kept["none"], logits)


def gathered_in_heap(run: Run, w: Weights, buffers: float) -> float:
    """The same of FSDP's gathered weights, and gradients on their way."""
    alone, on_device = run.world_size == 1, run.facility.node.device != "cpu"
    if alone or on_device or w.block_bytes > HEAP_BLOCK_BYTES:
        return 0
    passes = 1 if run.sharding.reshard_after_forward is False else 2
    blocks = KEPT_GATHERED * passes * w.layers * w.block_bytes
    return blocks + KEPT_REST * (w.rest * compute_bytes(run) + buffers)


def _small_blocks(run: Run, shape: Shape, activations: float, logits: float) -> float:
    """Of what a step keeps, and a chunk's logits, that which lies in the heap of a processor."""
    if run.facility.node.device != "cpu":
        return 0
    c, training = compute_bytes(run), run.training
    tokens = training.microbatch_samples * run.data.sequence_tokens / run.axes.tokens
    largest = tokens * max(shape.hidden, shape.intermediate) * c
    chunk = min(training.loss_chunk_tokens, tokens) * shape.vocabulary * FP32
    sizes = ((activations, largest), (logits, chunk))
    return sum(size for size, block in sizes if block <= HEAP_BLOCK_BYTES)
