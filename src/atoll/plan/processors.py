"""The seconds of a step on processors, from rates that `atoll plan --measure` found.

Ranks of a node share its cores: rates are measured with one rank alone and with several at once;
more ranks than that share what those had together.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from atoll.plan.activations import (
    PASSES,
    block_activations,
    passes_of,
    passes_over_head,
)
from atoll.plan.adapters import adapter_parameters, staying
from atoll.plan.messages import TENSORS, gathers
from atoll.plan.optimizer_work import orthogonal_flops
from atoll.plan.pipeline_parts import Part
from atoll.plan.shapes import Shape, family_of
from atoll.plan.weights import BF16, FP32, compute_bytes, weights_of
from atoll.settings import Run

Measured = Mapping[str, Any]  # `rates` of a certificate
STEP_BYTES = 7 * FP32  # of a parameter: four numbers read, three written
CLIP_BYTES = 6 * FP32  # of a gradient: read for its norm, scaled in place, cleared, added to
ADD_BYTES = 3 * FP32  # of a gradient, added to those of the microbatches before
AVERAGE_BYTES = 3 * FP32  # of a parameter: its average read and written, itself read
# by what is sent; of what is not here, as an all-reduce
COLLECTIVES = {"parameters": "all_gather", "gradients": "reduce_scatter"}
WITHIN_SAMPLES = ("tensor", "context")  # sent by DTensors in each layer, which takes their own time
# found by whole runs: of each part, the seconds of any step, of a block in each microbatch
# beyond what was measured of it, of a sharded tensor, of a gather of FSDP's whatever its bytes, and
# of a message within samples; and of the seconds of experts' products at their rate, what the
# busiest of those ranks has beyond the average that divide them. About what benchmarks/plan_time.py
# fits on EPYC and Xeon processors alike
USUAL = {
    "compute": 1.05,
    "memory": 1.0,
    "sent": 0.9,
    "step_seconds": 0.0,
    "block_seconds": 0.0025,
    "tensor_seconds": 0.001,
    "gather_seconds": 0.006,
    "message_seconds": 0.003,
    "uneven_experts": 0.85,
}


def compute_seconds(run: Run, shape: Shape, measured: Measured, part: Part) -> float:
    """Matrix products of a rank's blocks and head, and attention, each at the rate of its size."""
    over_weights, over_attention = passes_of(run)
    head = 0 if shape.labels else shape.head_parameters
    block = (shape.multiplied_parameters - head) / shape.layers
    width, products = _product_width(run, shape), _products(run)
    chunk = min(shape.hidden, _tokens_at_once(run), run.training.loss_chunk_tokens)
    attention = 4 * shape.query_width * shape.attended_tokens(run.data.sequence_tokens)
    rank, beside = _adapters(run, shape)
    of_layers = part.layers * (
        over_weights * 2 * block / _rate(run, measured, products, width)
        + over_attention
        * attention
        / _rate(run, measured, "attention_tflops", run.data.sequence_tokens)
        + PASSES["none"][0] * 2 * beside / _rate(run, measured, products, rank)
    )
    of_head = passes_over_head(run) * 2 * head / _rate(run, measured, products, chunk)
    seconds = _tokens_of_stage(run) * (of_layers + part.heads * of_head) / 1e12
    uneven = divided_seconds(run, shape, measured, part) * _factor(measured, "uneven_experts")
    return seconds * _factor(measured, "compute") + uneven


def divided_seconds(run: Run, shape: Shape, measured: Measured, part: Part) -> float:
    """Of the products of experts that ranks divide; the rank whose experts are asked for most has
    more of them, and the others wait for it in each layer.
    """
    if run.axes.expert == 1:
        return 0.0
    weights = part.layers * shape.expert_parameters * shape.active_experts / shape.experts
    rate = _rate(run, measured, _products(run), _product_width(run, shape))
    return passes_of(run)[0] * _tokens_of_stage(run) * 2 * weights / rate / 1e12


def orthogonal_seconds(run: Run, shape: Shape, measured: Measured) -> float:
    """Of Muon's products, in bf16 whatever the rest is; in fp32 where processors have no bf16."""
    flops = orthogonal_flops(run, shape)
    if not flops:
        return 0.0
    kinds = ("product_tflops_bf16", "product_tflops_fp32")
    rate = max(_rate(run, measured, kind, shape.hidden) for kind in kinds)
    return flops / rate / 1e12 * _factor(measured, "compute")


def state_seconds(run: Run, shape: Shape, measured: Measured) -> float:
    """The optimizer's step, and what FSDP takes whatever the sizes are."""
    weights = weights_of(run, shape, run.axes.pipeline - 1)
    added = ADD_BYTES * max(0, run.microbatches - 1)
    state = weights.learning * (CLIP_BYTES + added) / _rate(run, measured, "memory_gb_s")
    state += weights.learning * STEP_BYTES / _rate(run, measured, _optimizer_rate(run))
    averaged = bool(run.optimizer.ema_decay) * weights.learning * AVERAGE_BYTES
    state += averaged / _rate(run, measured, "memory_gb_s")
    own = _factor(measured, "step_seconds")
    own += sharded_tensors(run, shape) * _factor(measured, "tensor_seconds")
    own += gathers(run, shape) * _factor(measured, "gather_seconds")
    return state / 1e9 * _factor(measured, "memory") + own


def moving_seconds(run: Run, shape: Shape, measured: Measured, part: Part) -> float:
    """Of memory in the passes of all microbatches: activations, logits, what adapters add, and what
    each block costs whatever its size.
    """
    blocks = block_passes(run, part)
    kept = 2 * block_activations(run, shape) / _rate(run, measured, "block_gb_s")
    logits = FP32 * _tokens_of_stage(run) * part.heads * shape.vocabulary * (not shape.labels)
    moved = (blocks * kept + logits / _rate(run, measured, "logits_gb_s")) / 1e9
    moved += blocks * 1e-6 / _rate(run, measured, "blocks_per_us")
    if (beside := staying(run, shape)) is not None:
        numbers = _tokens_of_stage(run) * part.layers * beside.moved
        moved += compute_bytes(run) * numbers / _rate(run, measured, "memory_gb_s") / 1e9
    own = blocks * _factor(measured, "block_seconds")
    return moved * _factor(measured, "memory") + own


def block_passes(run: Run, part: Part) -> float:
    """Forward and backward passes of blocks in all microbatches; more where some are repeated."""
    share = PASSES[run.training.activation_checkpointing][0] / 3
    return run.microbatches * part.layers * share


def sharded_tensors(run: Run, shape: Shape) -> float:
    """That the norm of the gradients and the optimizer go through one by one, as DTensors."""
    if "fsdp" not in run.sharding.layouts:
        return 0.0
    return shape.layers / run.axes.pipeline * TENSORS[family_of(shape.family).gated] + 2


def sending_seconds(
    run: Run, measured: Measured, kind: str, size: float | None, messages: float
) -> float | None:
    """Latency and bytes; ranks beyond the cores take turns, and so do their messages."""
    if size is None or not measured.get("collectives"):
        return None if size is None or size > 0 else 0.0
    name = COLLECTIVES.get(kind, "all_reduce") if "fsdp" in run.sharding.layouts else "all_reduce"
    link = measured["collectives"][name]
    turns = max(1.0, run.ranks_per_node / measured["ranks"])
    seconds = messages * link["latency_us"] / 1e6 + size / (link["gb_s"] * 1e9)
    own = messages * _factor(measured, "message_seconds") if kind in WITHIN_SAMPLES else 0.0
    return float(seconds * turns * _factor(measured, "sent") + own)


def _products(run: Run) -> str:
    return f"product_tflops_{'bf16' if compute_bytes(run) == BF16 else 'fp32'}"


def has_optimizer_rate(run: Run, measured: Measured) -> bool:
    """Whether its optimizer's step was measured: older certificates have AdamW's alone."""
    return _optimizer_rate(run) in measured["alone"]


def _optimizer_rate(run: Run) -> str:
    return "optimizer_8bit_gb_s" if run.optimizer.name == "adamw_8bit" else "optimizer_gb_s"


def _tokens_of_stage(run: Run) -> float:
    """That a rank's stages pass on in a step."""
    tokens = run.training.global_batch_samples * run.data.sequence_tokens
    return tokens * run.axes.pipeline / run.world_size


def _tokens_at_once(run: Run) -> float:
    return run.training.microbatch_samples * run.data.sequence_tokens / run.axes.context


def _product_width(run: Run, shape: Shape) -> float:
    """The least side of a block's products, which their rate goes by."""
    return min(shape.hidden / run.axes.tensor, _tokens_at_once(run))


def _adapters(run: Run, shape: Shape) -> tuple[int, float]:
    """Their rank, and how many parameters of them a block has."""
    if run.model.lora is None:
        return 1, 0.0
    return run.model.lora.rank, adapter_parameters(run, shape) / shape.layers


def waiting_share(run: Run, measured: Measured) -> float:
    """Of a pipeline's bubble, what is lost: the cores of a rank that waits go to others."""
    return float(min(1.0, measured["cores"] / run.ranks_per_node))


def _rate(run: Run, measured: Measured, name: str, size: float = 0.0) -> float:
    """Of one of so many ranks; between one and those that were measured, along a line."""
    alone, together = (_at(measured[way][name], size) for way in ("alone", "together"))
    ranks, most = run.ranks_per_node, measured["ranks"]
    if ranks >= most:
        return float(together * most / ranks)
    return float(alone + (together - alone) * (ranks - 1) / (most - 1))


def _at(rate: float | Mapping[str, float], size: float) -> float:
    """A rate, or that of a size between those measured, along the logarithm."""
    if not isinstance(rate, Mapping):
        return rate
    known = sorted((int(each), value) for each, value in rate.items())
    if size <= known[0][0]:
        return known[0][1]
    for (low, first), (high, second) in itertools.pairwise(known):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return first + (second - first) * part
    return known[-1][1]


def _factor(measured: Measured, name: str) -> float:
    return float(measured.get("factors", USUAL).get(name, USUAL[name]))
