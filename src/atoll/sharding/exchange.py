"""Gradients synchronised by hand, after the backward pass: the plainest strategies.

To add one, write a function (gradients, ranks) -> None here, add it to EXCHANGES, and name it in a
YAML of hydra_conf/sharding/. What it sends is unknown until plan/traffic.py has its formula.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Sequence[Tensor], int], None]


def all_reduce(gradients: Sequence[Tensor], ranks: int) -> None:
    """Sum each gradient over all ranks, then divide by their number."""
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(ranks)


def gather_scatter(gradients: Sequence[Tensor], ranks: int) -> None:
    """The first rank gathers each gradient of all ranks, averages, and scatters the mean."""
    first = dist.get_rank() == 0
    for gradient in gradients:
        parts = [torch.empty_like(gradient) for _ in range(ranks)] if first else None
        dist.gather(gradient, parts)
        mean = None if parts is None else torch.stack(parts).mean(dim=0)
        dist.scatter(gradient, None if mean is None else [mean] * ranks)


EXCHANGES: dict[str, Exchange] = {"all_reduce": all_reduce, "gather_scatter": gather_scatter}
