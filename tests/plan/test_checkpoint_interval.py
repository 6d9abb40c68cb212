"""The interval between checkpoints: closed forms, against what they minimise."""

import math

import numpy as np
import pytest

from atoll.plan.checkpoint_interval import (
    daly_seconds,
    interval_steps,
    seconds_between_failures,
    young_seconds,
)


def test_young_and_daly_agree_where_saves_are_cheap():
    assert young_seconds(2.0, 10_000.0) == 200.0
    assert daly_seconds(2.0, 10_000.0) == pytest.approx(200.0, rel=0.01)
    assert daly_seconds(50.0, 10.0) == 10.0  # saving takes longer than a run lasts


def test_no_other_interval_loses_less():
    """Daly's complete cost model: exponential failures, each redoes what was not saved."""
    save, between = 30.0, 3_600.0

    def cost(interval):
        return between * math.expm1((interval + save) / between) / interval

    intervals = np.linspace(60, 2_000, 20_000)
    best = intervals[np.argmin([cost(interval) for interval in intervals])]
    assert daly_seconds(save, between) == pytest.approx(best, rel=0.01)


def test_of_a_job_any_node_may_fail():
    assert seconds_between_failures(100, 0.01) == 86_400.0
    # 16,384 GPUs of eight a node, 419 interruptions in 54 days: one in three hours
    rate = 419 / 54 / 2048
    assert seconds_between_failures(2048, rate) == pytest.approx(54 * 86_400 / 419)


def test_steps_are_whole_and_a_save_ends_before_the_next():
    assert interval_steps(2.0, 10.0, 4.0, 10_000.0) == round(daly_seconds(2.0, 10_000.0) / 4)
    assert interval_steps(0.0, 30.0, 4.0, 10_000.0) == 8
    assert interval_steps(0.1, 0.1, 1e9, 10.0) == 1
