"""Parameters that learn otherwise than the rest, by a pattern of their names."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from atoll.errors import UserError
from atoll.settings import Optimizer, ParameterGroup


def freeze(settings: Optimizer, model: nn.Module) -> None:
    """Take the gradients of what is frozen; before the model is divided among ranks.

    Raises `UserError` for a group that names no parameter, or none that learns.
    """
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of_group = {name: group_of(settings.groups, name) for name in learning}
    for group in settings.groups:
        if not any(group is other for other in of_group.values()):
            some = ", ".join(name.removeprefix("hf.") for name in list(learning)[:3])
            raise UserError(
                f"optimizer.groups: {group.names!r} names no parameter that learns, or all of them "
                "are in groups before it",
                f"names are as in the model: {some}; * stands for any part",
            )
    for name, own in of_group.items():
        if own is not None and own.frozen:
            learning[name].requires_grad_(False)
    if settings.groups and not any(p.requires_grad for p in learning.values()):
        raise UserError(
            "optimizer.groups: every parameter is frozen", "leave some of them out of frozen groups"
        )


def group_of(groups: Sequence[ParameterGroup], name: str) -> ParameterGroup | None:
    """The first group that names a parameter."""
    own = name.removeprefix("hf.")
    return next((group for group in groups if fnmatchcase(own, group.names)), None)


def optimizer_groups(
    settings: Optimizer,
    named: Sequence[tuple[str, Tensor]],
    of_width: Mapping[str, float] | None = None,
    copied: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Groups as torch's optimizers take them; vectors (norms, biases) are not decayed.

    of_width: parameter -> what muP multiplies its rate with; what a step decays stays the same.
    copied: parameter -> the one that it is a copy of, on another stage, and learns as.
    """
    decay = settings.weight_decay
    groups: dict[tuple[float, float], list[Tensor]] = {(1.0, decay): [], (1.0, 0.0): []}
    for name, parameter in named:
        group = group_of(settings.groups, (copied or {}).get(name, name))
        scale = (of_width or {}).get(name, 1.0)
        own_decay = decay if parameter.ndim >= 2 else 0.0
        if group is not None and group.weight_decay is not None:
            own_decay = group.weight_decay
        own_decay /= scale
        factor = scale * (1.0 if group is None else group.learning_rate_factor)
        groups.setdefault((factor, own_decay), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "learning_rate_factor": factor}
        for (factor, decay), parameters in groups.items()
        if parameters
    ]
