"""Model FLOP utilisation: what a token costs, and what a device could do at its peak."""

import numpy as np
import torch

from atoll.data.pack import PackingPlan
from atoll.health.probes import measured_tflops
from atoll.plan.shapes import Shape
from atoll.settings import Node

MFU_FORMULA = (
    "tokens/s/device * (6*N + 12*L*d*C) / peak, N parameters without embeddings, L layers, "
    "d hidden size, C mean context (half of it is masked, counted in full; what lies outside "
    "windows of attention is not counted); "
    "beside A parameters of adapters 4*N + 6*A, as frozen weights have no gradients"
)

# dense bf16 TFLOP/s from the vendors' data sheets; MI250X per GCD. V100: fp16, it has no bf16.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "GH200": 989.0,
    "MI250X": 191.5,
    "V100": 125.0,
}


def peak_tflops(node: Node, device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """The peak of one device, and where the number comes from.

    None for an unknown accelerator: a guessed peak makes every MFU wrong.
    """
    if node.peak_tflops is not None:
        return node.peak_tflops, "facility.node.peak_tflops"
    if device.type == "cpu":
        return measured_tflops(dtype, device), f"matrix product measured on this rank, {dtype}"
    name = torch.cuda.get_device_name(device)
    for known, value in sorted(PEAK_TFLOPS.items(), key=lambda item: -len(item[0])):
        if known in name:
            return value, f"data sheet of {known}"
    return None, f"the peak of {name} is not known: set facility.node.peak_tflops (dense bf16)"


def flops_per_token(shape: Shape, mean_context_tokens: float, adapters: int | None = None) -> float:
    """Forward and backward (Chowdhery et al. 2022, appendix B): 6 N + 12 L d C.

    Beside A `adapters`, which alone learn, the rest has no gradients: 4 N + 6 A + 12 L d C.
    """
    attention = 12 * shape.layers * shape.query_width * mean_context_tokens
    passes = 6.0 if adapters is None else 4.0
    return passes * shape.multiplied_parameters + 6.0 * (adapters or 0) + attention


def mean_context_tokens(packing: PackingPlan, shape: Shape) -> float:
    """What a token sees of the document piece that it lies in, on average over tokens."""
    pieces = np.bincount(packing.piece_length)  # of each length
    lengths = np.flatnonzero(pieces)
    seen = np.array([shape.attended_tokens(int(length)) for length in lengths])
    return float(np.average(seen, weights=pieces[lengths] * lengths))
