"""Weights and combining rules on numbers that a person can follow."""

from pathlib import Path
from typing import Any

import numpy
import numpy.typing
import pytest
import torch

from atoll.campaign.lasting_settings import refuse_what_loses
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.errors import UserError
from atoll.federation import combine, step
from atoll.federation.update import UpdateManifest
from atoll.settings.federation import Rule

Floats = numpy.typing.NDArray[numpy.float32]


def manifests(tokens: list[int], steps: list[int] | None = None) -> list[UpdateManifest]:
    pairs = zip(tokens, steps or tokens, strict=True)
    return [UpdateManifest.model_construct(tokens=t, steps=s) for t, s in pairs]


def weights(tokens: list[int], late: list[int] | None = None, **rule: Any) -> list[float]:
    return combine.weights_of(manifests(tokens), late or [0] * len(tokens), Rule(**rule))


def test_weights_add_up_to_one() -> None:
    assert weights([1, 3], weigh="tokens") == [0.25, 0.75]
    assert weights([1, 3]) == [0.5, 0.5], "nobody has more than half by default"
    assert weights([1, 3], weigh="equal") == [0.5, 0.5]
    steps = combine.weights_of(manifests([1, 1], [1, 4]), [0, 0], Rule(weigh="steps"))
    assert steps == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize(
    ("tokens", "cap", "expected"),
    [
        ([1, 1, 2], 0.6, [0.25, 0.25, 0.5]),
        ([1, 1, 8], 0.5, [0.25, 0.25, 0.5]),
        ([1, 3, 16], 0.5, [0.125, 0.375, 0.5]),
        # the second is over the cap only after it has its part of what the first gave up
        ([5, 35, 60], 0.45, [0.1, 0.45, 0.45]),
        ([1, 2, 3, 4, 90], 0.3, [0.07, 0.14, 0.21, 0.28, 0.3]),
        ([1, 9, 90], 0.4, [0.2, 0.4, 0.4]),
        ([1, 1], 0.5, [0.5, 0.5]),
        ([1, 9], 0.5, [0.5, 0.5]),
        ([7], 1.0, [1.0]),
    ],
)
def test_nobody_has_more_than_the_cap(tokens: list[int], cap: float, expected: list[float]) -> None:
    assert weights(tokens, weigh="capped", cap=cap) == pytest.approx(expected)


def test_a_cap_that_leaves_weight_to_nobody_is_refused(tmp_path: Path) -> None:
    """Of a new campaign, which knows how many facilities there are."""
    sites = [{"name": name, "folder": name} for name in ("a", "b", "c")]
    values = {"name": "c", "start": [], "sites": sites, "rule": {"cap": 0.3}}
    with pytest.raises(UserError, match=r"rule.cap=0.3 of 3 facilities is less than all: 0.333"):
        refuse_what_loses(CampaignStore(checked_campaign(values), tmp_path))


@pytest.mark.parametrize(("count", "cap"), [(2, 0.34), (3, 0.3), (2, 1e-9)])
def test_where_some_are_missing_the_cap_gives_the_others_the_same(count: int, cap: float) -> None:
    late = [0, *[2] * (count - 1)]
    assert weights([9, 5, 1][:count], cap=cap) == pytest.approx([1 / count] * count)
    assert weights([9, 5, 1][:count], late, cap=cap) == pytest.approx([1 / count] * count)


def test_late_work_weighs_less_by_the_polynomial_rule() -> None:
    by_tokens = {"weigh": "tokens"}
    late = weights([1, 1], [0, 3], staleness_exponent=1.0, **by_tokens)
    assert late == pytest.approx([0.8, 0.2])  # 1 and 1 / (1 + 3)
    late = weights([1, 1], [0, 3], staleness_exponent=0.5, **by_tokens)
    assert late == pytest.approx([2 / 3, 1 / 3])
    assert weights([1, 1], [0, 3], staleness_exponent=0.0) == [0.5, 0.5]
    assert weights([1, 1, 2], [0, 3, 3], staleness_exponent=1.0) == pytest.approx(
        [0.5, 1 / 6, 1 / 3]
    )


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1000.0])
@pytest.mark.parametrize("late", [[0, 3, 3], [3, 0, 0], [2, 2, 2], [0, 0, 1]])
def test_nobody_has_more_than_the_cap_where_others_are_late(
    late: list[int], exponent: float
) -> None:
    found = weights([1000, 500, 500], late, staleness_exponent=exponent)
    assert max(found) <= 0.5 + 1e-9 and sum(found) == pytest.approx(1.0)


def test_the_mean_is_summed_in_double_and_changes_no_update() -> None:
    values = torch.tensor([[1.0, 2.0**20], [1.0, 1.0], [2.0, 1.0]])
    kept = values.clone()
    mean = combine.mean(values, torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64), Rule())
    assert mean.dtype == torch.float32
    assert mean.tolist() == [1.5, 2.0**18 + 0.75]
    assert torch.equal(values, kept)
    large = torch.tensor([[2.0**24], [1.0], [1.0]])
    ones = torch.ones(3, dtype=torch.float64)
    assert combine.mean(large, ones, Rule()).item() == 2.0**24 + 2  # in fp32 both ones are lost


def test_the_median_of_each_coordinate() -> None:
    any_weights = torch.ones(5)
    odd = torch.tensor([[9.0, 1.0], [1.0, 5.0], [4.0, 2.0], [0.0, 8.0], [5.0, 9.0]])
    assert combine.median(odd, any_weights, Rule()).tolist() == [4.0, 5.0]
    assert combine.median(odd[:4], any_weights, Rule()).tolist() == [2.5, 3.5]
    assert combine.median(odd[:2], any_weights, Rule()).tolist() == [5.0, 3.0]
    assert combine.median(odd[:1], any_weights, Rule()).tolist() == [9.0, 1.0]


def test_the_trimmed_mean_leaves_out_as_many_on_both_sides() -> None:
    values = torch.tensor([[100.0], [1.0], [3.0], [2.0], [-900.0]])
    any_weights = torch.ones(5)
    assert combine.trimmed_mean(values, any_weights, Rule(trim=1)).tolist() == [2.0]
    assert combine.trimmed_mean(values, any_weights, Rule(trim=2)).tolist() == [2.0]
    assert combine.trimmed_mean(values[:4], any_weights, Rule(trim=0)).tolist() == [26.5]
    assert combine.trimmed_mean(values[:4], any_weights, Rule(trim=1)).tolist() == [2.5]


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        (Rule(combine="mean"), 1),
        (Rule(combine="median"), 1),
        (Rule(combine="trimmed_mean", trim=2), 5),
        (Rule(combine="krum", krum_bad=2), 7),
    ],
)
def test_a_rule_needs_so_many_updates(rule: Rule, least: int) -> None:
    combine.refuse_too_few(least, rule)
    with pytest.raises(UserError) as refused:
        combine.refuse_too_few(least - 1, rule)
    assert refused.value.found == (
        f"combine={rule.combine} needs at least {least} updates, {least - 1} are there"
    )


def krum_choice(points: list[list[float]], bad: int) -> list[float]:
    values_KN = torch.tensor(points, dtype=torch.float64)
    return combine.krum_weights(values_KN @ values_KN.T, bad)


def test_krum_looks_at_its_nearest_neighbours_alone() -> None:
    # The update at 1 has the nearest two neighbours; with three, the far one would decide.
    line = [[0.0], [1.0], [2.2], [10.0], [1000.0]]
    assert krum_choice(line, bad=1) == [0.0, 1.0, 0.0, 0.0, 0.0]
    # Two lie together, three lie close: one neighbour chooses a pair, two choose the three.
    pair = [[5.0, 0.0], [5.0, 1.0], [5.0, -1.0], [0.0, 0.0], [0.0, 0.1], [900.0, 0.0]]
    assert krum_choice(pair, bad=3) == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert krum_choice(pair, bad=2) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # Not the shortest update, nor the one whose products with the others are largest.
    far = [[100.0], [101.0], [102.0], [0.0], [300.0]]
    assert krum_choice(far, bad=1) == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("place", [(0, 1), (1, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("asymmetry", [1 + 1e-9, 1 - 1e-9])
def test_of_two_that_are_as_near_krum_takes_the_first_whatever_rounding_says(
    place: tuple[int, int], asymmetry: float
) -> None:
    """Of three updates two are always each other's nearest."""
    points_KN = torch.tensor([[1.0, 0.1], [1.1, -0.1], [3.0, 2.0]], dtype=torch.float64)
    gram_KK = points_KN @ points_KN.T
    gram_KK[place] *= asymmetry
    assert combine.krum_weights(gram_KK, 0) == [1.0, 0.0, 0.0]
    assert combine.krum_weights(gram_KK.flip(0, 1), 0) == [0.0, 1.0, 0.0]


def test_long_updates_are_shortened_to_the_clip_norm() -> None:
    assert combine.clip_factors([0.0, 0.25, 1.0, 16.0], 2.0) == [1.0, 1.0, 1.0, 0.5]
    assert combine.clip_factors([0.25, 16.0], 0.25) == [0.5, 0.0625]
    assert combine.clip_factors([9.0, 16.0], None) == [1.0, 1.0]


@pytest.mark.parametrize("count", [1, 2, 7, 1000, 65_537])
def test_a_length_has_the_bits_of_one_order_of_additions(count: int) -> None:
    values_N = torch.randn(count, generator=torch.Generator().manual_seed(count))
    squares = [x * x for x in values_N.tolist()]
    while len(squares) > 1:
        half = len(squares) // 2
        pairs = zip(squares[:half], squares[half : 2 * half], strict=True)
        squares = [*(a + b for a, b in pairs), *squares[2 * half :]]
    assert combine.squared_length(values_N) == squares[0]


def test_krum_and_clipping_measure_all_updates_first() -> None:
    assert combine.needs_norms_first(Rule(combine="krum"))
    assert combine.needs_norms_first(Rule(clip_norm=1.0))
    assert not combine.needs_norms_first(Rule())
    assert not combine.needs_norms_first(Rule(combine="median"))


def one_by_one(update: str, delta: Floats, memory: dict[str, Floats], rule: Rule) -> Floats:
    """A server's step in fp32, each operation rounded by itself."""
    rate, beta1, beta2 = (numpy.float32(x) for x in (rule.learning_rate, rule.beta1, rule.beta2))
    new1, new2 = numpy.float32(1 - rule.beta1), numpy.float32(1 - rule.beta2)
    if update == "replace":
        return rate * delta
    if update in ("momentum", "nesterov"):
        memory["momentum"] = memory["momentum"] * beta1 + delta
        ahead = delta + beta1 * memory["momentum"]
        return rate * (memory["momentum"] if update == "momentum" else ahead)
    square = delta * delta
    if update == "adam":
        memory["variance"] = memory["variance"] * beta2 + square * new2
    else:
        ways = numpy.sign(memory["variance"] - square)
        memory["variance"] = memory["variance"] - square * new2 * ways
    memory["momentum"] = memory["momentum"] * beta1 + delta * new1
    return rate * memory["momentum"] / (numpy.sqrt(memory["variance"]) + numpy.float32(rule.tau))


@pytest.mark.parametrize("count", [1, 24, 4103, 1 << 16])
@pytest.mark.parametrize("update", ["replace", "momentum", "nesterov", "adam", "yogi"])
def test_a_step_has_the_bits_of_one_operation_after_another(update: Any, count: int) -> None:
    """So it has the same on every processor."""
    rule = Rule(update=update, learning_rate=0.0031, beta1=0.9, beta2=0.99)
    drawn = numpy.random.default_rng(count)
    delta = drawn.standard_normal(count).astype("f4") * numpy.float32(1e-3)
    memory = {"momentum": drawn.standard_normal(count).astype("f4") * numpy.float32(1e-3)}
    memory["variance"] = drawn.random(count).astype("f4") * numpy.float32(1e-6)
    own = {name: torch.from_numpy(values.copy()) for name, values in memory.items()}
    given = torch.from_numpy(delta.copy())
    added = step.STEPS[update](given, own, rule)
    assert (added.numpy() == one_by_one(update, delta, memory, rule)).all()
    assert all((own[name].numpy() == memory[name]).all() for name in memory)
    assert (given.numpy() == delta).all()


def test_every_rule_that_may_be_chosen_is_there() -> None:
    assert set(combine.WEIGH) == {"tokens", "steps", "equal", "capped"}
    assert set(combine.COMBINE) == {"mean", "median", "trimmed_mean", "krum"}


def test_the_mean_in_parts_has_the_bits_of_the_whole() -> None:
    torch.manual_seed(0)
    values_KN, weights_K = (
        torch.randn(3, 2 * combine.CACHED + 77),
        torch.tensor([0.5, 0.3, 0.2]).double(),
    )
    total_N = values_KN[0].double() * weights_K[0]
    for values_N, weight in zip(values_KN[1:], weights_K[1:], strict=True):
        total_N += values_N.double() * weight
    assert torch.equal(combine.mean(values_KN, weights_K, Rule()), total_N.float())
