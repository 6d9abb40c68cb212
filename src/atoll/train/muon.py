"""Muon: matrices of the blocks learn by orthogonalised momentum, all else by AdamW.

Keller Jordan 2024, with the step size of Liu et al. 2025 (Moonlight), which suits AdamW's learning
rates. torch.optim.Muon takes no DTensor; one process has its very steps here. Where a matrix is
divided among ranks, each gathers it in bf16, which the iteration computes in anyway. A mixture's
experts are matrices of their own in one tensor: a rank takes those that it has whole.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from atoll.train.precision import has_bf16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
ITERATIONS = 5
LEAST_NORM = 1e-7
GATHERED_AS = torch.bfloat16  # whole matrices, and what the iteration computes in


class Muon:
    """Both optimizers as one: their groups, states and steps together.

    groups: those with `orthogonal` true are of matrices.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
    ) -> None:
        matrices = [group for group in groups if group["orthogonal"]]
        rest = [group for group in groups if not group["orthogonal"]]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(Orthogonal(matrices, lr, momentum))
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=True))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        each = {parameter: own for part in self.parts for parameter, own in part.state.items()}
        return defaultdict(dict, each)

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Orthogonal(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; each matrix may be divided among ranks."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; collective where matrices are divided: all ranks take the same order."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(matrix.grad.lerp(buffer, momentum))
                matrix.mul_(1 - rate * group["weight_decay"])
                # the root mean square of an update is then that of AdamW's
                matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape[-2:])))


def orthogonal(update: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly, of each expert too; divided as the update."""
    if not isinstance(update, DTensor):
        return newton_schulz(update.to(GATHERED_AS))
    mesh, placements = update.device_mesh, update.placements
    narrow: Any = update.to(GATHERED_AS)
    by_expert = update.ndim == 3 and all(type(p) in (Shard, Replicate) for p in placements)
    kept = [p if by_expert and p == Shard(0) else Replicate() for p in placements]
    whole = newton_schulz(narrow.redistribute(mesh, kept).to_local())
    sizes = {"shape": update.shape, "stride": update.stride()}
    return DTensor.from_local(whole, mesh, kept, run_check=False, **sizes).redistribute(
        mesh, placements
    )


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five steps of the quintic Newton-Schulz iteration, in bf16; of one matrix or of a batch."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    narrow = matrix.dtype == torch.bfloat16 and not has_bf16(matrix.device)
    rounded = in_fp32 if narrow else in_own_numbers
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = rounded(torch.matmul, x, x.mT)
        polynomial = rounded(partial(add_product, beta=b, alpha=c), gram, gram, gram)
        x = rounded(partial(add_product, beta=a), x, polynomial, x)
    return x.mT if is_tall else x


def in_own_numbers(product: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    return product(*matrices)


def in_fp32(product: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    """Rounded once, as kernels for bf16 do: where no hardware is behind those, 40 times faster."""
    wide = {id(matrix): matrix.float() for matrix in matrices}  # one may be there more than once
    return product(*(wide[id(matrix)] for matrix in matrices)).to(matrices[0].dtype)
