"""Bytes that DeepSpeed's ZeRO keeps on a rank, by stage (Rajbhandari et al. 2020).

Beside weights in the arithmetic's numbers it has a master copy in fp32, which is divided, as the
moments are. Its buffers are of fixed sizes, or as large as the model where that is smaller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FP32 = 4
# DeepSpeed's own, in numbers
REDUCE_BUCKET, MAX_LIVE_PARAMETERS = 500_000_000, 1_000_000_000
RUNTIME_GIB = 0.134  # what importing it takes on a processor


@dataclass(frozen=True)
class ZeroParts:
    """Bytes of a rank."""

    weights: float
    optimizer: float  # the master copy and the moments
    gradients: float
    gathered: float  # weights of other ranks that stay until the backward pass
    buffers: float  # gradients on their way, and what is sent of them
    host: float  # of these, what offload puts into the node's memory


def stage_of(words: Mapping[str, Any]) -> int:
    """The stage that DeepSpeed's configuration asks for."""
    return int(words.get("zero_optimization", {}).get("stage", 0))


def is_on_disk(words: Mapping[str, Any]) -> bool:
    """Whether parameters or moments live in files, which no formula here counts."""
    parts = words.get("zero_optimization", {}).values()
    return any(isinstance(part, dict) and part.get("device") == "nvme" for part in parts)


def zero_parts(
    words: Mapping[str, Any], parameters: float, ranks: int, number_bytes: int, offload: bool
) -> ZeroParts:
    """words: `sharding.deepspeed`; number_bytes: of a number in the arithmetic."""
    stage, settings = stage_of(words), words.get("zero_optimization", {})
    bucket = min(parameters, settings.get("reduce_bucket_size", REDUCE_BUCKET))
    live = min(parameters, settings.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS))
    whole, own = parameters * number_bytes, parameters * number_bytes / ranks
    weights = own if stage == 3 else whole
    optimizer = 3 * FP32 * parameters / (ranks if stage else 1)
    # stage 1 keeps them whole as well, until the step
    gradients = own if stage >= 2 else whole + own
    buffers = bucket * number_bytes * (2 if stage >= 2 else 1)
    gathered = live * number_bytes if stage == 3 else 0
    host = weights + optimizer + gradients if offload else 0
    return ZeroParts(weights, optimizer, gradients, gathered, buffers, host)
