"""Activations that a rank of a pipeline keeps: the planner's count against the schedule itself."""

from itertools import accumulate

import pytest

from atoll.plan.memory import microbatches_in_flight
from atoll.sharding.schedule import FORWARD, Action, training_programs


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("per_rank", "groups"), [(1, 0), (2, 1), (2, 3), (3, 2), (4, 4)])
def test_as_many_as_the_schedule_keeps(ranks: int, per_rank: int, groups: int) -> None:
    microbatches = groups * ranks or 5  # interleaving takes a multiple of the ranks
    for rank, program in enumerate(training_programs(ranks, per_rank, microbatches)):
        actions = [step for step in program if isinstance(step, Action)]
        kept = accumulate(1 if action.direction == FORWARD else -1 for action in actions)
        counted = microbatches_in_flight(ranks, per_rank, microbatches, rank)
        assert counted == max(kept) / per_rank
