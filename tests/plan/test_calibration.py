"""What finished runs teach: medians, bounded, of their own family and size alone."""

from pathlib import Path
from typing import Any

import pytest
import small_run

from atoll.plan.calibration import (
    STEP_BOUNDS,
    Sample,
    calibration_of,
    memory_factor,
    step_factor,
    strategy_family,
)


def sample(ratio: float, planned: float = 0.5, family: str = "fsdp", **changes: Any) -> Sample:
    each = Sample(family, planned, ratio * planned, 1.0, 1.1, 30.0)
    return each._replace(**changes)


def test_a_factor_is_the_median_of_its_family_and_size() -> None:
    learned = calibration_of(
        [sample(1.2), sample(1.4), sample(9.0), sample(3.0, family="ddp"), sample(7.0, 0.0005)]
    )
    assert step_factor(learned, "fsdp", 0.4) == (1.4, 3)
    assert step_factor(learned, "ddp", 0.5) == (3.0, 1)
    assert step_factor(learned, "fsdp", 0.0005) == (7.0, 1)
    assert memory_factor(learned, "fsdp", 1.0) == (pytest.approx(1.08), 4)
    assert (learned["start_seconds"], learned["start_runs"]) == (30.0, 5)


def test_a_size_without_runs_takes_that_of_the_nearest_within_a_power_of_ten() -> None:
    learned = calibration_of([sample(1.5, 0.5), sample(1.2, 3.0), sample(1.3, 3.0)])
    assert step_factor(learned, "fsdp", 0.05) == (1.5, 1) == step_factor(learned, "fsdp", 0.9)
    assert step_factor(learned, "fsdp", 25.0) == (1.25, 2) == step_factor(learned, "fsdp", 1.2)
    assert step_factor(learned, "fsdp", 80.0) is None
    assert step_factor(learned, "tensor", 0.5) is None
    # where it is no bound, the plan counts as a run beside those of another size
    assert step_factor(learned, "fsdp", 0.05, True) == (pytest.approx(1.25), 1)
    assert step_factor(learned, "fsdp", 3.0, True) == step_factor(learned, "fsdp", 3.0)
    assert step_factor(None, "fsdp", 0.5) is None and memory_factor(None, "fsdp", 1.0) is None


def test_memory_of_a_job_that_ran_here_is_its_own_and_of_another_the_median() -> None:
    took = {1.0: 0.8, 2.0: 2.2, 4.0: 6.0}
    learned = calibration_of(
        [sample(1.0, planned_gib=gib, measured_gib=measured) for gib, measured in took.items()]
    )
    own = {gib: memory_factor(learned, "fsdp", gib) for gib in (1.00005, 4.0, 1.01)}
    assert own[1.00005] == (pytest.approx(0.9), 1)  # the plan counts as a run
    assert own[4.0] == (pytest.approx(1.25), 1)
    assert own[1.01] == (pytest.approx((1 + 3 * 1.1) / 4), 3)
    assert memory_factor(learned, "ddp", 1.0) is None


def test_a_certificate_of_an_earlier_version_has_one_factor_for_a_family() -> None:
    known = {"memory": [{"family": "fsdp", "factor": 1.2, "runs": 4}]}
    assert memory_factor(known, "fsdp", 3.0) == (pytest.approx(1.16), 4)


def test_a_factor_stays_within_its_bounds() -> None:
    assert step_factor(calibration_of([sample(1e4)]), "fsdp", 0.5) == (STEP_BOUNDS[1], 1)
    assert step_factor(calibration_of([sample(1e-4)]), "fsdp", 0.5) == (STEP_BOUNDS[0], 1)


def test_what_was_not_planned_teaches_nothing_of_it() -> None:
    learned = calibration_of([sample(1.0, planned_seconds=None, start_seconds=None)])
    assert learned["step"] == [] and learned["start_seconds"] is None
    assert memory_factor(learned, "fsdp", 1.0) == (pytest.approx(1.05), 1)


@pytest.mark.parametrize(
    ("name", "sizes", "family"),
    [
        ("single", {}, "one rank"),
        ("ddp", {}, "ddp"),
        ("full_shard", {}, "fsdp"),
        ("shard_grad_op", {}, "fsdp"),
        ("full_shard", {"tensor": 2}, "fsdp + tensor"),
        ("all_reduce", {}, "all_reduce"),
    ],
)
def test_strategies_that_err_alike(name: str, sizes: dict[str, int], family: str) -> None:
    ranks = 1 if name == "single" else 2
    spread = small_run.sharding(name) | sizes
    run = small_run.settings(Path("/nowhere"), ranks, sharding=spread)
    assert strategy_family(run) == family
