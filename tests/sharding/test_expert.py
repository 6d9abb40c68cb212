"""Tokens that go to the ranks of their experts and back, against all experts in one place."""

from typing import Any

import families
import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from atoll.models.build import build_config, skeleton
from atoll.models.parts import blocks_of, parts_of
from atoll.settings import Model
from atoll.sharding.expert import ExchangedExperts, experts_of
from atoll.sharding.process_group import World

RANKS, TOKENS = 4, 6
ROUTES = {
    "spread": lambda rank: torch.tensor([[(t + rank) % 4, (t + 1) % 4] for t in range(TOKENS)]),
    "one_sided": lambda rank: torch.tensor([[0, 1]] * TOKENS),  # two of the ranks receive nothing
    "uneven": lambda rank: torch.tensor([[rank, 3]] * TOKENS),
}


def experts(implementation: str) -> Any:
    settings = Model(name="x", config=families.config_of("mixtral"))
    hf = skeleton(build_config(settings, families.VOCABULARY, 16, {}))
    [module] = experts_of(blocks_of(hf, parts_of(hf))[0]).values()
    module.config._experts_implementation = implementation
    torch.manual_seed(0)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, families.WIDTH, generator=generator)
    return x.requires_grad_(), torch.rand(TOKENS, 2, generator=generator).requires_grad_()


def exchanged(world: World, route: str, implementation: str) -> Any:
    group = init_device_mesh("cpu", (RANKS,)).get_group()
    module = experts(implementation)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(parameter.detach().chunk(RANKS)[world.rank]))
    module.forward = ExchangedExperts(module, group)
    x, weights = tokens_of(world.rank)
    y = module(x, ROUTES[route](world.rank), weights)
    (y * (world.rank + 1)).square().sum().backward()
    return y.detach(), x.grad, weights.grad, [p.grad for p in module.parameters()]


def test_experts_that_every_token_goes_to_are_not_taken() -> None:
    class All(nn.Module):
        num_experts = 2

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(2, 4, 4))

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states @ self.up

    assert experts_of(nn.ModuleList([All()])) == {}


def test_experts_are_grouped_products_where_nothing_else_is_asked_for() -> None:
    settings = Model(name="x", config=families.config_of("mixtral"))
    hf = skeleton(build_config(settings, families.VOCABULARY, 16, {}))
    assert hf.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("route", ROUTES)
def test_exchanged_tokens_equal_the_loop(ranks: RankPool, route: str, implementation: str) -> None:
    whole = experts("eager")
    got = ranks.run(exchanged, route, implementation)
    for rank, (y, x_gradient, weight_gradient, _) in enumerate(got):
        x, weights = tokens_of(rank)
        expected = whole(x, ROUTES[route](rank), weights)
        (expected * (rank + 1)).square().sum().backward()
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(x_gradient, x.grad, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weight_gradient, weights.grad, atol=1e-5, rtol=1e-5)
    for number, parameter in enumerate(whole.parameters()):
        # as FSDP's mean over the ranks with the same experts needs them
        parts = torch.cat([parts[number] for *_, parts in got]) * RANKS
        torch.testing.assert_close(parts, parameter.grad, atol=1e-4, rtol=1e-5)
