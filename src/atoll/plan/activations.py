"""Bytes that a step keeps of what it computes, and what recomputing some of it takes.

Legend: c bytes of a number in the arithmetic, h hidden width, i intermediate width.
"""

from atoll.plan.adapters import Staying, staying
from atoll.plan.shapes import Shape, family_of
from atoll.plan.weights import FP32, compute_bytes
from atoll.settings import Run

# Passes over the weights that training multiplies, and over attention: forward, two backward, and
# forward again.
PASSES = {"none": (3, 3), "selective": (4, 3), "full": (4, 4)}
FROZEN = 1  # of the backward passes over weights: those that stay have no gradients
# How many times the intermediate width a family's activation function keeps: ReLU its result,
# GELU its input too; GPT-2's is written out, and its products keep what they multiply: the input,
# half of it, the tanh, one more than that, and the result.
ACTIVATION_COPIES = {"gpt2": 5, "opt": 1, "bert": 2}


def passes_of(run: Run) -> tuple[int, int]:
    """Over the weights that training multiplies, and over attention; fewer beside adapters."""
    over_weights, over_attention = PASSES[run.training.activation_checkpointing]
    return over_weights - FROZEN * (run.model.lora is not None), over_attention


def passes_over_head(run: Run) -> int:
    """It is computed again where answers are compared, and nowhere else."""
    again = run.task.name == "preference"
    return PASSES["none"][0] - FROZEN * (run.model.lora is not None) + again


def microbatches_in_flight(ranks: int, per_rank: int, microbatches: int, rank: int) -> float:
    """How many microbatches' activations of all its layers a rank of a pipeline keeps at once.

    1F1B, and interleaved where a rank has several stages (Narayanan et al. 2021).
    """
    behind = ranks - rank - 1
    if per_rank > 1:
        behind = 2 * behind + (per_rank - 1) * ranks
    return min(behind + 1, microbatches * per_rank) / per_rank


def kept_activations(run: Run, shape: Shape, blocks: float) -> dict[str, float]:
    """For the backward pass of so many blocks, by what is recomputed."""
    block, entrance = block_activations(run, shape), _block_input(run, shape)
    recomputed = entrance * blocks + block
    selective = recomputed + attention_results(run, shape) * blocks
    return {"none": block * blocks, "selective": selective, "full": recomputed}


def block_activations(run: Run, shape: Shape) -> float:
    """What one block keeps for one microbatch's backward pass, without activation checkpointing."""
    c, tensor, parts = compute_bytes(run), run.axes.tensor, staying(run, shape)
    all_tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.context
    own_tokens, h, i = all_tokens / tensor, shape.hidden, shape.expert_width
    gathered = 2 * h * c * all_tokens if tensor > 1 else 0
    if run.axes.expert > 1:  # hidden states as they come to the experts, and as they come back
        gathered += 2 * h * c * all_tokens * shape.active_experts
    # queries, keys, values; what attention gives, and the same put together from its segments
    kept = 2 * shape.query_width + 2 * shape.kv_width
    # which processors compute in fp32 in any case: oneDNN would compile bf16 for each length
    a = FP32 if run.facility.node.device == "cpu" else c
    attention = kept * a + shape.query_width * c + FP32 * shape.heads
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


def _block_input(run: Run, shape: Shape) -> float:
    tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.tokens
    return tokens * shape.hidden * compute_bytes(run)


def logits_bytes(run: Run, shape: Shape) -> float:
    """A chunk's logits and probabilities, and the head's gradient, which is whole at once."""
    c, tokens = compute_bytes(run), run.training.loss_chunk_tokens
    all_tokens = run.training.microbatch_samples * run.data.sequence_tokens / run.axes.tokens
    numbers = min(tokens, all_tokens) * shape.vocabulary
    head = (run.model.lora is None) * shape.head_parameters * FP32
    if run.task.name == "preference":
        # computed again in the backward pass: logits, and three such while theirs are made; each
        # chunk's gradient of the head is whole, and added to those before
        return numbers * (c + 3 * FP32) + head * (1 + (all_tokens > tokens))
    # of the chunk before, the gradient is there until this one's is
    before = c * (all_tokens > tokens)
    chunk = numbers * (c + FP32 + (c if c < FP32 else 0) + before)
    return chunk + head + all_tokens * shape.hidden * c
