"""What ranks of this machine do in a second: the inside half of `atoll plan --measure`.

First one rank alone with all cores, then all ranks at once with theirs, then their collectives.
"""

import contextlib
import json
import os
import statistics
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from atoll import run_dir
from atoll.health.probes import copy_gb_s, seconds_of
from atoll.launch import Placement
from atoll.models.loss import chunked_cross_entropy
from atoll.monitor.bandwidth import timed
from atoll.settings import load_run
from atoll.sharding.process_group import World, gathered, joined, say

WIDTHS = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}  # small and large inner dimensions
TOKENS = {"cpu": 512, "cuda": 8192}
SEQUENCES = {"cpu": (128, 512), "cuda": (1024, 4096)}
OPTIMIZED = {"cpu": 2**22, "cuda": 2**27}  # parameters of one AdamW step
MESSAGES_BYTES = {"cpu": (2**10, 2**23), "cuda": (2**10, 2**27)}
BLOCK = {"hidden": 256, "intermediate": 704, "heads": 4}
PASSES = 3  # over all rates
DIFFERENCES = ("logits_gb_s", "block_gb_s", "blocks_per_us")
SECONDS_EACH = 0.2  # at most, of what is repeated
# how many messages of a ring follow one another, and how often the message goes around
HOPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Rates = dict[str, Any]


def main(run_folder: Path, placement: Placement) -> int:
    """Measure, and put it into the facility's certificate, beside what stands there."""
    run = load_run(run_dir.settings_file(run_folder))
    with joined(run, placement) as world:
        rates = measured(world)
        if world.rank == 0:
            run_dir.add_to_certificate(run, {"rates": rates})
        say(world, json.dumps(rates, indent=1))
        say(world, f"certificate: {run_dir.certificate(run)}")
    return 0


def measured(world: World) -> Rates:
    """The same on every rank; where there is one alone, it has nobody to send to."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    alone = gathered(world, best_rates(world.device) if world.rank == 0 else None)[0]
    torch.set_num_threads(threads)
    together = alone
    if world.size > 1:
        gathered(world, None)
        together = _mean(gathered(world, best_rates(world.device)))
    return {
        "measured_on": datetime.now(timezone.utc).date().isoformat(),
        "device": world.device.type,
        "cores": cores,
        "ranks": world.size,
        "alone": alone,
        "together": together,
        "collectives": links(world) if world.size > 1 else {},
    }


def best_rates(device: torch.device) -> Rates:
    """The best of some passes, each rate by itself: what else a machine does only adds to it.

    Of those that are a difference of two times, the median: noise makes them too high as well.
    """
    passes = [own_rates(device) for _ in range(PASSES)]
    medians = _each(passes, statistics.median)
    return _each(passes, max) | {name: medians[name] for name in DIFFERENCES}


def own_rates(device: torch.device) -> Rates:
    """Of one rank: products by width, attention by length, memory, blocks, logits, optimizer."""
    rates: Rates = {
        f"product_tflops_{name}": {
            str(width): products_tflops(device, dtype, width) for width in WIDTHS[device.type]
        }
        for name, dtype in DTYPES.items()
    }
    lengths = SEQUENCES[device.type]
    rates["attention_tflops"] = {str(n): attention_tflops(device, n) for n in lengths}
    rates["memory_gb_s"] = copy_gb_s(device)
    rates |= optimizers_gb_s(device)
    tflops = rates["product_tflops_fp32"][str(WIDTHS[device.type][1])]
    rates["logits_gb_s"] = logits_gb_s(device, tflops)
    least = block_seconds(device, 16, 16, 48, 2)
    rates["blocks_per_us"] = 1e-6 / least
    rates["block_gb_s"] = block_gb_s(device, rates, least)
    return rates


def products_tflops(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """The three products of a linear layer: forward, and both gradients."""
    tokens = TOKENS[device.type]
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(width, width, device=device, dtype=dtype)

    def products() -> None:
        y = x @ weight.T
        y @ weight
        y.T @ x

    return 6 * tokens * width**2 / quick_seconds(device, products) / 1e12


def attention_tflops(device: torch.device, tokens: int) -> float:
    """Causal, forward and backward; counted in full, as the plan counts it."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    heads, width = 4, 64
    query, key, value = (
        torch.randn(1, heads, tokens, width, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )

    def attention() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    return 12 * tokens**2 * heads * width / quick_seconds(device, attention) / 1e12


def optimizers_gb_s(device: torch.device) -> Rates:
    """Of a step of AdamW, fused and in 8 bit, by AdamW's four numbers read and three written."""
    rates = {"optimizer_gb_s": optimizer_gb_s(device, partial(torch.optim.AdamW, fused=True))}
    with contextlib.suppress(Exception):  # it fails in many ways where it lacks a backend
        import bitsandbytes

        rates["optimizer_8bit_gb_s"] = optimizer_gb_s(device, bitsandbytes.optim.AdamW8bit)
    return rates


def optimizer_gb_s(device: torch.device, kind: Callable[..., torch.optim.Optimizer]) -> float:
    parameter = torch.zeros(OPTIMIZED[device.type], device=device, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    return 28 * parameter.numel() / quick_seconds(device, kind([parameter]).step) / 1e9


def logits_gb_s(device: torch.device, tflops: float) -> float:
    """What the loss does beside its products, by the bytes of the logits in fp32."""
    tokens, width, vocabulary = TOKENS[device.type], WIDTHS[device.type][1], 4096
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    # as small as a model's: large ones make denormal shares, which some processors multiply slowly
    head = (0.02 * torch.randn(vocabulary, width, device=device)).requires_grad_()
    labels = torch.zeros(tokens, dtype=torch.long, device=device)
    seconds = quick_seconds(
        device, lambda: chunked_cross_entropy(hidden, head, None, labels, tokens)
    )
    rest = seconds - 6 * tokens * width * vocabulary / (tflops * 1e12)
    return 4 * tokens * vocabulary / max(rest, seconds / 10) / 1e9


def block_gb_s(device: torch.device, rates: Rates, least: float) -> float:
    """What a block does beside products and attention, by what it keeps for the backward pass."""
    tokens, (hidden, intermediate, heads) = 512, BLOCK.values()
    seconds = block_seconds(device, tokens, hidden, intermediate, heads)
    products = 6 * tokens * (4 * hidden**2 + 3 * hidden * intermediate)
    attention = 12 * tokens**2 * hidden
    rate = rates["product_tflops_fp32"][str(WIDTHS[device.type][1])]
    spent = products / rate + attention / rates["attention_tflops"][str(SEQUENCES["cpu"][1])]
    rest = max(seconds - spent / 1e12 - least, seconds / 20)
    # both norms, queries, keys, values and what attention gives, and the MLP: plan/memory.py
    kept = tokens * (44 * hidden + 4 * heads + 16 * intermediate)
    return 2 * kept / rest / 1e9


def block_seconds(
    device: torch.device, tokens: int, hidden: int, intermediate: int, heads: int
) -> float:
    """Forward and backward of one Llama block: three of them less one, halved."""
    from transformers import LlamaConfig, LlamaModel

    times = []
    for layers in (1, 3):
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
        model = LlamaModel._from_config(config, attn_implementation="sdpa").to(device)
        ids = torch.zeros(1, tokens, dtype=torch.long, device=device)

        def both(model: Any = model, ids: torch.Tensor = ids) -> None:
            model(ids, use_cache=False).last_hidden_state.sum().backward()

        times.append(quick_seconds(device, both))
    return max((times[1] - times[0]) / 2, 1e-6)


def links(world: World) -> dict[str, dict[str, float]]:
    """Latency of one message, and bytes as the plan counts them, of each collective."""
    found = {}
    sizes = MESSAGES_BYTES[world.device.type]
    fastest = _each([message_seconds(world, sizes) for _ in range(PASSES)], min)
    for name, hops in HOPS.items():
        # gloo makes a reduce-scatter of an all-reduce, and the plan counts both ways
        around = 2 if name == "reduce_scatter" and world.device.type == "cpu" else hops
        first, second = (fastest[name][size] for size in sizes)
        bytes_sent = around * (world.size - 1) / world.size * sizes[1]
        found[name] = {
            "latency_us": first / (around * (world.size - 1)) * 1e6,
            "gb_s": bytes_sent / max(second - first, second / 10) / 1e9,
        }
    return found


def message_seconds(world: World, sizes: tuple[int, int]) -> dict[str, dict[int, float]]:
    """Of each collective by the bytes of its message: a median, and the slowest rank's."""
    return {name: {size: timed(world, name, size).seconds for size in sizes} for name in HOPS}


def quick_seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Of calls behind a first one, for as long as SECONDS_EACH and three at least.

    The time that a quarter of them keep: what else the machine does only adds to it. A first call
    that takes longer than that is the only one: what it does just once is little beside it.
    """
    first = seconds_of(device, call)
    if first > SECONDS_EACH:
        return first
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < SECONDS_EACH and len(seconds) < 200):
        seconds.append(seconds_of(device, call))
    return sorted(seconds)[len(seconds) // 4]


def _mean(rates: list[Rates]) -> Rates:
    """Over ranks."""
    return _each(rates, statistics.mean)


def _each(rates: list[Rates], of: Callable[[list[float]], float]) -> Rates:
    """Number for number."""
    first = rates[0]
    return {
        key: _each([each[key] for each in rates], of)
        if isinstance(first[key], dict)
        else of([each[key] for each in rates])
        for key in first
    }
