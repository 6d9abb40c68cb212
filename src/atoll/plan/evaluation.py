"""Bytes beside the weights while a run measures itself: its held-out loss, and scores of tasks."""

from atoll.plan.activations import block_activations
from atoll.plan.shapes import Shape
from atoll.plan.weights import BF16, FP32, compute_bytes
from atoll.settings import Run


def forward_bytes(run: Run, shape: Shape, stage: int) -> float:
    """Of a pass that keeps nothing: one block at work, or a chunk's logits and their logarithms."""
    tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.tokens
    hidden = tokens * shape.hidden * compute_bytes(run)
    chunk = min(run.training.loss_chunk_tokens, tokens) * shape.vocabulary
    is_last = stage == run.axes.pipeline - 1
    logits = is_last * chunk * (compute_bytes(run) + FP32)
    return hidden + max(block_activations(run, shape), logits)


def scoring_bytes(run: Run, shape: Shape) -> float:
    """What scoring a task adds on each rank: the whole model as it is exported, and its logits.

    How long a task's documents are is known when they are read: of a sample's length here.
    """
    each = FP32 if run.export.dtype == "float32" else BF16
    logits = 2 * run.data.sequence_tokens * shape.vocabulary  # and their logarithms
    return float(each * (shape.parameters + logits))
