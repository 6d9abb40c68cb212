"""Attention to documents and short samples on processors, against torch's kernel in bf16.

    python benchmarks/short_attention.py [--rounds 10] [--check]

4,096 tokens, six heads of 64, forward and backward, under autocast. Each round has documents of
other lengths, as training has. What a way leaves in memory is seen in a process of its own.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import results
import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS, HEADS, WIDTH = 4096, 6, 64
WARM_UP, PASSES = 10, 100
Lengths = tuple[int, ...] | None
Way = Callable[[list[Tensor], Lengths], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--check", action="store_true", help="fail where the target is missed")
    parser.add_argument("--left-by", choices=["ours", "peer"], help="print MiB left in memory")
    arguments = parser.parse_args()
    if arguments.left_by:
        print(left_mib(ours if arguments.left_by == "ours" else torchs))
        return 0
    rows = [
        timed("samples of 512 tokens, documents of about 150", 512, 150, arguments.rounds),
        timed("samples of 512 tokens, documents of about 20", 512, 20, arguments.rounds),
        timed("samples of 512 tokens, documents of about 3,000", 512, 3000, arguments.rounds),
        timed("samples of 128 tokens, whole", 128, None, arguments.rounds),
        timed("samples of 256 tokens, whole", 256, None, arguments.rounds),
    ]
    case = f"memory left by {PASSES} passes over documents of about 150"
    left = alone("ours"), alone("peer")
    rows.append(results.row(case, "MiB", [left[0]], "bf16 kernel", [left[1]], "lower", 1.0))
    return int(not results.record("short_attention", rows) and arguments.check)


def timed(case: str, sample_tokens: int, about: int | None, rounds: int) -> dict[str, object]:
    draw = random.Random(0)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(WARM_UP + rounds):
        lengths = None if about is None else documents(draw, sample_tokens, about)
        ways = {
            "ours": partial(one_pass, ours, sample_tokens, lengths),
            "peer": partial(one_pass, torchs, sample_tokens, lengths),
        }
        turns = results.in_turns(ways, 2)
        if number >= WARM_UP:
            seconds = {name: seconds[name] + turns[name] for name in seconds}
    return results.row(case, "s", seconds["ours"], "bf16 kernel", seconds["peer"], "lower", 1.0)


def documents(draw: random.Random, sample_tokens: int, about: int) -> tuple[int, ...]:
    """Lengths that fill the samples, `about` being their median before they are cut."""
    lengths: list[int] = []
    for _ in range(TOKENS // sample_tokens):
        left = sample_tokens
        while left:
            lengths.append(min(left, 1 + int(about * draw.lognormvariate(0, 1))))
            left -= lengths[-1]
    return tuple(lengths)


def one_pass(way: Way, sample_tokens: int, lengths: Lengths) -> float:
    shape = (TOKENS // sample_tokens, HEADS, sample_tokens, WIDTH)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        out = way(inputs, lengths)
    out.sum().backward()
    return time.perf_counter() - started


def ours(inputs: list[Tensor], lengths: Lengths) -> Tensor:
    from atoll.models.attention import packed_attention

    query, key, value = inputs
    return packed_attention(torch.nn.Module(), query, key, value, None, segment_lengths=lengths)[0]


def torchs(inputs: list[Tensor], lengths: Lengths) -> Tensor:
    """A call for each document; its flash kernel wants a batch's dimension."""
    if lengths is None:
        return F.scaled_dot_product_attention(*inputs, is_causal=True)
    flat = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in inputs)
    parts = zip(*(x[None].split(lengths, dim=2) for x in flat), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)


def alone(way: str) -> float:
    command = [sys.executable, __file__, "--left-by", way]
    return float(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)


def left_mib(way: Way) -> float:
    draw, before = random.Random(0), resident_mib()
    for _ in range(PASSES):
        one_pass(way, 512, documents(draw, 512, 150))
    return resident_mib() - before


def resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    sys.exit(main())
