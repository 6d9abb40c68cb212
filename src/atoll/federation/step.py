"""The server's step: what the global model makes of the combined update.

Legend: N values of a stretch; delta is what training added, so its negative is a gradient
(Reddi et al. 2021, "Adaptive federated optimization"). A new step is one function and one line.
Each operation is rounded by itself: what torch does in one (addcmul_, add_ with alpha) is fused on
some processors, and has other bits there.
"""

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from atoll.settings.federation import Rule

# (delta, memory by name, rule) -> what is added to the model; the memory is changed in place
Step = Callable[[Tensor, dict[str, Tensor], Rule], Tensor]


def replace(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    """FedAvg (McMahan et al. 2017) where the rate is 1."""
    return rule.learning_rate * delta_N


def momentum(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    """FedAvgM (Hsu et al. 2019)."""
    velocity = memory["momentum"].mul_(rule.beta1).add_(delta_N)
    return rule.learning_rate * velocity


def nesterov(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    """DiLoCo's outer step (Douillard et al. 2023): SGD with Nesterov's momentum, as in torch."""
    velocity = memory["momentum"].mul_(rule.beta1).add_(delta_N)
    return rule.learning_rate * (delta_N + rule.beta1 * velocity)


def adam(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    """FedAdam (Reddi et al. 2021, algorithm 2): no bias correction, v begins at tau squared."""
    squares = memory["variance"]
    squares.mul_(rule.beta2).add_(delta_N.square().mul_(1 - rule.beta2))
    return _adaptive(delta_N, memory, rule)


def yogi(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    """FedYogi (Reddi et al. 2021, algorithm 2): v moves by so much, whichever way it goes."""
    squares, square = memory["variance"], delta_N.square()
    ways = torch.sign(squares - square)
    squares.sub_(square.mul_(1 - rule.beta2).mul_(ways))
    return _adaptive(delta_N, memory, rule)


def _adaptive(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    mean = memory["momentum"].mul_(rule.beta1).add_(delta_N * (1 - rule.beta1))
    # torch's own root may be MKL's, which is not always the nearest number
    root = torch.from_numpy(numpy.sqrt(memory["variance"].numpy()))
    return rule.learning_rate * mean / root.add_(rule.tau)


STEPS: dict[str, Step] = {
    "replace": replace,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "yogi": yogi,
}


def momentum_late(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    memory["momentum"].add_(delta_N)
    return rule.learning_rate * delta_N


def nesterov_late(delta_N: Tensor, memory: dict[str, Tensor], rule: Rule) -> Tensor:
    memory["momentum"].add_(delta_N)
    return rule.learning_rate * (1 + rule.beta1) * delta_N


# what a delta adds to a fragment that was averaged without it: as much as it would have in time,
# and nothing of the momentum a second time
LATE_STEPS: dict[str, Step] = {
    "replace": replace,
    "momentum": momentum_late,
    "nesterov": nesterov_late,
}


def fresh_memory(rule: Rule) -> dict[str, float]:
    """What a step remembers between rounds, and what each value of it begins as."""
    zero = {"momentum": 0.0}
    return {
        "replace": {},
        "momentum": zero,
        "nesterov": zero,
        "adam": zero | {"variance": rule.tau**2},
        "yogi": zero | {"variance": rule.tau**2},
    }[rule.update]
