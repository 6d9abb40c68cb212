"""The optimizer, its learning-rate schedule, and the update itself."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.errors import UserError
from atoll.models.mup import Scale, Widths
from atoll.settings import Optimizer
from atoll.sharding.expert import experts_of
from atoll.sharding.tied_ends import copied_names
from atoll.train.muon import Muon
from atoll.train.parameter_groups import optimizer_groups

RANK_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda ranks: 1.0,
    "sqrt": lambda ranks: math.sqrt(ranks),
    "linear": lambda ranks: float(ranks),
}
# (step, steps) of the decay -> how much is left of the way from the peak to its final fraction
DECAYS: dict[str, Callable[[int, int], float]] = {
    "constant": lambda step, steps: 1.0,
    "cosine": lambda step, steps: 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps))),
    # as Hugging Face's: the first step takes the peak, the last what stands one step before zero
    "linear": lambda step, steps: max(0.0, (steps - step + 1) / steps),
    # behind the steps that hold the peak: 1 - sqrt (Hägele et al. 2024)
    "wsd": lambda step, steps: 1.0 - math.sqrt(min(1.0, step / steps)),
}


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer and, per parameter's name, the model's parameter and the one it updates.

    The two differ only where the optimizer cannot take a DTensor: then the second one is the
    rank's own shard, in the same memory.
    """

    inner: Any
    parameters: dict[str, tuple[Tensor, Tensor]]
    # the weights a proximal term pulls to, and how strongly (FedProx, Li et al. 2020)
    anchors: dict[str, Tensor] = field(default_factory=dict)
    proximal: float = 0.0
    # the weights' average over the steps, and how much of it each step keeps
    averages: dict[str, Tensor] = field(default_factory=dict)
    ema_decay: float = 0.0
    copies: frozenset[str] = frozenset()  # of weights that another stage of a pipeline counts
    # what muP multiplies gradients with, before they are clipped
    gradient_scales: dict[str, float] = field(default_factory=dict)


def make_optimizer(
    settings: Optimizer, model: nn.Module, widths: Widths | None = None
) -> NamedOptimizer:
    """The optimizer over the parameters that learn, each with the settings of its group.

    widths: what muP scales their steps by.
    """
    local = settings.name == "adamw_8bit"
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pairs = {name: (p, _own_shard(p) if local else p) for name, p in learning.items()}
    scales = {} if widths is None else {n: widths.scale(n, p) for n, p in learning.items()}
    groups = _groups(settings, model, {name: own for name, (_, own) in pairs.items()}, scales)
    rate, betas, epsilon = settings.learning_rate, settings.betas, settings.epsilon
    optimizer = KINDS[settings.name](settings)(groups, lr=rate, betas=betas, eps=epsilon)

    def as_they_begin(wanted: object) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in learning.items()} if wanted else {}

    return NamedOptimizer(
        optimizer,
        pairs,
        anchors=as_they_begin(settings.proximal),
        proximal=settings.proximal,
        averages=as_they_begin(settings.ema_decay),
        ema_decay=settings.ema_decay or 0.0,
        copies=frozenset(copied_names(model)),
        gradient_scales={n: s.gradient for n, s in scales.items() if s.gradient != 1.0},
    )


def _groups(
    settings: Optimizer, model: nn.Module, learning: dict[str, Tensor], scales: dict[str, Scale]
) -> list[dict[str, Any]]:
    """Groups as the optimizer takes them: one kernel takes all of a group, which is of one mesh."""
    groups: list[dict[str, Any]] = []
    names = {id(own): name for name, own in learning.items()}
    matrices = hidden_matrices(model) if settings.name == "muon" else frozenset()
    for orthogonal in (True, False):
        of_width = {n: s.orthogonal_rate if orthogonal else s.rate for n, s in scales.items()}
        chosen = [own for name, own in learning.items() if (name in matrices) == orthogonal]
        for same in by_mesh(chosen):
            named = [(names[id(own)], own) for own in same]
            made = optimizer_groups(settings, named, of_width, copied_names(model))
            groups += [group | {"orthogonal": orthogonal} for group in made]
    return groups


def learning_rate(settings: Optimizer, step: int, total_steps: int, ranks: int) -> float:
    """The learning-rate schedule: linear warm-up, then a decay; step 1 is the first.

    ranks: data-parallel ones, whose number the peak may be scaled with.
    """
    peak = settings.learning_rate * RANK_SCALES[settings.scale_with_ranks](ranks)
    if step <= settings.warmup_steps:
        return peak * step / settings.warmup_steps
    if settings.decay == "inverse_sqrt":  # Vaswani et al. 2017; no step but the warm-up's counts
        share = math.sqrt(max(1, settings.warmup_steps) / step)
        return peak * max(settings.final_fraction, share)
    peak_steps = total_steps - settings.cooldown(total_steps) if settings.decay == "wsd" else 0
    begin = max(settings.warmup_steps, peak_steps)
    if step <= begin:
        return peak
    share = DECAYS[settings.decay](step - begin, max(1, total_steps - begin))
    return peak * (settings.final_fraction + (1.0 - settings.final_fraction) * share)


def hidden_matrices(model: Any) -> frozenset[str]:
    """Names of the matrices of the blocks, those of experts too: neither embeddings nor heads."""
    blocks = f"hf.{model.parts.blocks}."
    experts = {
        f"{blocks}{number}.{name}."
        for number, block in model.hf.get_submodule(model.parts.blocks).named_children()
        for name in experts_of(block)
    }
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if name.startswith(blocks)
        and (parameter.ndim == 2 or (parameter.ndim == 3 and name.startswith(tuple(experts))))
    )


Decision = Callable[[], Tensor]  # 1.0 where the update is left out, else 0.0
Judge = Callable[[Tensor], Decision]  # of the gradient norm, once all ranks have told theirs


def take_step(
    optimizer: NamedOptimizer,
    rate: float,
    clip_norm: float | None,
    pipeline: Any = None,
    judge: Judge | None = None,
) -> Tensor:
    """Clip, update, clear the gradients; returns the gradient's norm before clipping.

    pipeline: the group of ranks that hold other layers of the same model.
    """
    for name, scale in optimizer.gradient_scales.items():
        parameter, _ = optimizer.parameters[name]
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    for name, anchor in optimizer.anchors.items():
        parameter, _ = optimizer.parameters[name]
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - anchor, alpha=optimizer.proximal)
    counted = [p.grad for n, (p, _) in optimizer.parameters.items() if n not in optimizer.copies]
    norm = gradient_norm([gradient for gradient in counted if gradient is not None])
    if pipeline is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=pipeline)
        norm = squared.sqrt()
    decision = None if judge is None else judge(norm)  # ranks hear of each other while they clip
    if clip_norm is not None:
        for same in by_mesh([p for p, _ in optimizer.parameters.values()]):
            torch.nn.utils.clip_grads_with_norm_(same, clip_norm, norm.to(same[0].device))
    for parameter, own in optimizer.parameters.values():
        if own is not parameter and parameter.grad is not None:
            own.grad = _local(parameter.grad)
    for group in optimizer.inner.param_groups:
        group["lr"] = rate * group["learning_rate_factor"]
    _update(optimizer.inner, None if decision is None else decision())
    clear_gradients(optimizer)
    for name, average in optimizer.averages.items():
        parameter, _ = optimizer.parameters[name]
        _local(average).lerp_(_local(parameter.detach()), 1.0 - optimizer.ema_decay)
    return norm


@contextmanager
def averaged(optimizer: NamedOptimizer) -> Iterator[None]:
    """The model with the average of its weights in their place."""
    _swap(optimizer)
    try:
        yield
    finally:
        _swap(optimizer)


@torch.no_grad()
def _swap(optimizer: NamedOptimizer) -> None:
    for name, average in optimizer.averages.items():
        weights, average = _local(optimizer.parameters[name][0].detach()), _local(average)
        kept = weights.clone()
        weights.copy_(average)
        average.copy_(kept)


def _update(inner: Any, skipped: Tensor | None) -> None:
    """The optimizer's step, which changes nothing where `skipped` is 1.

    Fused AdamW looks at that on the device, as it does for torch's GradScaler: nobody waits.
    """
    if isinstance(inner, torch.optim.AdamW):
        inner.found_inf = skipped  # type: ignore[attr-defined]
    elif skipped is not None and bool(skipped):
        return
    inner.step()


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all of them together, of which ranks may hold parts."""
    norms = [torch.nn.utils.get_total_norm(same) for same in by_mesh(gradients)]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def by_mesh(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Those of one mesh and placement together, in the order in which they first come."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def clear_gradients(optimizer: NamedOptimizer) -> None:
    for parameter, own in optimizer.parameters.values():
        parameter.grad = None
        own.grad = None


def optimizer_state_dict(optimizer: NamedOptimizer) -> dict[str, Tensor]:
    """Every state tensor under "parameter/key"; made first if no step was taken yet."""
    if not optimizer.inner.state:
        _make_state(optimizer)
    return {
        f"{name}/{key}": value
        for name, (_, own) in optimizer.parameters.items()
        for key, value in optimizer.inner.state[own].items()
        if isinstance(value, Tensor)
    }


def step_counts(optimizer: NamedOptimizer) -> dict[str, int]:
    """The counters that an optimizer keeps as plain integers (8-bit AdamW)."""
    return {
        name: value
        for name, (_, own) in optimizer.parameters.items()
        for key, value in optimizer.inner.state[own].items()
        if key == "step" and isinstance(value, int)
    }


def load_step_counts(optimizer: NamedOptimizer, counts: dict[str, int]) -> None:
    """Set the counters; those noted are the first rank's, and of its stage of a pipeline alone."""
    for name, (_, own) in optimizer.parameters.items() if counts else ():
        optimizer.inner.state[own]["step"] = counts.get(name, max(counts.values()))


def _make_state(optimizer: NamedOptimizer) -> None:
    """One step of zero gradients at rate zero creates the state and changes no weight."""
    for _, own in optimizer.parameters.values():
        own.grad = torch.zeros_like(own)
    for group in optimizer.inner.param_groups:
        group["lr"] = 0.0
    optimizer.inner.step()
    clear_gradients(optimizer)
    # nor does it count: the corrections of the moments' bias start with the first real step
    for state in optimizer.inner.state.values():
        if "step" not in state:
            continue
        state["step"] = torch.zeros_like(state["step"]) if torch.is_tensor(state["step"]) else 0


def _adamw_8bit(settings: Optimizer) -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError(
            f"optimizer=adamw_8bit needs bitsandbytes, which does not import here: {error}",
            "make setup installs it (a wheel: pip install 'WHEEL[train]'), or take optimizer=adamw",
        ) from error
    return bitsandbytes.optim.AdamW8bit


KINDS: dict[str, Callable[[Optimizer], Any]] = {
    "adamw": lambda settings: partial(torch.optim.AdamW, fused=True),
    "adamw_8bit": _adamw_8bit,
    "muon": lambda settings: partial(Muon, momentum=settings.momentum),
}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own_shard(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach())
