"""The schedule of a pipeline, carried out without processes as NCCL would: by rendezvous.

A transfer ends when both its ranks are at it; there are no tags, so transfers between two ranks
meet in order, each direction for itself; those of one exchange go on independently of each other;
and a rank goes on only when its exchange is over.
"""

from collections.abc import Sequence

import pytest

from atoll.sharding.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    Exchange,
    Program,
    Transfer,
    evaluation_programs,
    training_programs,
)

SIZES = [
    (ranks, per_rank, microbatches)
    for ranks in range(2, 9)
    for per_rank in range(1, 5)
    for microbatches in range(1, 17)
    if per_rank == 1 or microbatches % ranks == 0  # what a run's settings allow
]


class Rank:
    """One rank under way: where it is, what has arrived, and what of its exchange is open."""

    def __init__(self, program: Program) -> None:
        self.program, self.at = program, 0
        self.arrived: set[Action] = set()
        self.open: list[Transfer] = []
        self.most_waiting = 0

    def go_on(self, stages: int) -> bool:
        """Take the next steps that need nobody else; whether there were any."""
        before = self.at
        while not self.open and self.at < len(self.program):
            step = self.program[self.at]
            self.at += 1
            if isinstance(step, Exchange):
                self.open = list(step.transfers)
            elif step.source(stages) is not None:
                assert step in self.arrived, f"{step} begins before its input is there"
                self.arrived.remove(step)
        return self.at > before

    def first(self, peer: int, sends: bool) -> Transfer | None:
        """The oldest open transfer with a peer in one direction."""
        matching = (t for t in self.open if t.peer == peer and t.sends is sends)
        return next(matching, None)


def carry_out(programs: Sequence[Program], stages: int) -> list[Rank]:
    """All ranks to their ends; fails where they wait for each other or take what is not theirs."""
    ranks = [Rank(program) for program in programs]
    while any(rank.at < len(rank.program) or rank.open for rank in ranks):
        moved = [rank.go_on(stages) for rank in ranks] + [
            meet(ranks, sender, receiver)
            for sender in range(len(ranks))
            for receiver in range(len(ranks))
        ]
        assert any(moved), "deadlock: " + str([rank.open for rank in ranks])
    return ranks


def meet(ranks: Sequence[Rank], sender: int, receiver: int) -> bool:
    """One message from a rank to another, where both are at it."""
    sent = ranks[sender].first(receiver, sends=True)
    received = ranks[receiver].first(sender, sends=False)
    if sent is None or received is None:
        return False
    assert sent.action == received.action, f"{sent} would be taken for {received}"
    ranks[sender].open.remove(sent)
    ranks[receiver].open.remove(received)
    ranks[receiver].arrived.add(received.action)
    ranks[receiver].most_waiting = max(ranks[receiver].most_waiting, len(ranks[receiver].arrived))
    return True


def compute(program: Program) -> list[Action]:
    return [step for step in program if isinstance(step, Action)]


@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_rank_waits_for_ever_and_every_message_is_the_right_one(ranks: int) -> None:
    for _, per_rank, microbatches in [size for size in SIZES if size[0] == ranks]:
        stages = ranks * per_rank
        programs = training_programs(ranks, per_rank, microbatches)
        ended = carry_out(programs, stages)
        for rank, program in enumerate(programs):
            own = range(rank, stages, ranks)
            every = {
                Action(direction, microbatch, stage)
                for direction in (FORWARD, BACKWARD)
                for microbatch in range(microbatches)
                for stage in own
            }
            actions = compute(program)
            assert len(actions) == len(every) and set(actions) == every
            assert not ended[rank].arrived, "what arrives is used"


@pytest.mark.parametrize("ranks", range(2, 9))
def test_evaluation_goes_through_all_stages(ranks: int) -> None:
    for per_rank in range(1, 5):
        programs = evaluation_programs(ranks, per_rank)
        carry_out(programs, ranks * per_rank)
        for rank, program in enumerate(programs):
            assert [a.stage for a in compute(program)] == list(range(rank, ranks * per_rank, ranks))


def one_by_one(program: Program, stages: int, ranks: int) -> Program:
    """The same computations, each after a receive of its own and before a send of its own."""
    steps: Program = []
    for action in compute(program):
        source, target = action.source(stages), action.target(stages)
        if source is not None:
            steps.append(Exchange((Transfer(False, source % ranks, action),)))
        steps.append(action)
        if target is not None:
            steps.append(Exchange((Transfer(True, target.stage % ranks, target),)))
    return steps


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 1), (4, 1), (2, 2), (8, 4)])
def test_sends_one_by_one_would_wait_for_each_other(ranks: int, per_rank: int) -> None:
    """What any 1F1B does that sends when it has computed and receives when it computes."""
    stages, programs = ranks * per_rank, training_programs(ranks, per_rank, ranks)
    alone = [one_by_one(program, stages, ranks) for program in programs]
    with pytest.raises(AssertionError, match="deadlock"):
        carry_out(alone, stages)


def test_messages_that_change_places_would_be_seen() -> None:
    programs = training_programs(2, 1, 4)
    sends = [
        (at, step)
        for at, step in enumerate(programs[0])
        if isinstance(step, Exchange) and any(t.sends for t in step.transfers)
    ]
    (at, first), (later, second) = sends[:2]
    programs[0][at], programs[0][later] = second, first
    with pytest.raises(AssertionError, match="would be taken for"):
        carry_out(programs, 2)


@pytest.mark.parametrize("per_rank", [1, 2, 4])
def test_few_messages_wait_to_be_used(per_rank: int) -> None:
    """Messages are received when they are sent, and are used soon after."""
    for ranks in (2, 4, 8):
        ended = carry_out(training_programs(ranks, per_rank, 16), ranks * per_rank)
        assert max(rank.most_waiting for rank in ended) <= max(4, ranks // 2)
