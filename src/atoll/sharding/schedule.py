"""Which microbatch passes which stage when, and when ranks exchange what: lists, no processes.

Legend: P ranks of a pipeline, v stages of each, S = P*v stages; stage s lives on rank s % P.

NCCL knows no tags: messages between two ranks meet in the order of the calls, and a send may wait
until its receive is called. So all ranks' lists are made together, tick by tick. In a tick each
rank computes at most one action; then, in one exchange, it sends what it made and receives what
its neighbours made for it. The k-th exchange of two ranks is of the same tick on both, and holds
at most one message each way, so nothing can be mixed up; and no rank waits for a later tick, so
none waits for ever. Transfers of one exchange may not wait for each other: that is what NCCL
promises for the calls of a group (NCCL user guide, "Point-to-point communication").
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """One microbatch through one stage, in one direction."""

    direction: str
    microbatch: int
    stage: int

    def source(self, stages: int) -> int | None:
        """The stage whose output this takes; None for tokens, and for the loss."""
        stage = self.stage + (-1 if self.direction == FORWARD else 1)
        return stage if 0 <= stage < stages else None

    def target(self, stages: int) -> "Action | None":
        """The action that takes what this one makes."""
        stage = self.stage + (1 if self.direction == FORWARD else -1)
        return self._replace(stage=stage) if 0 <= stage < stages else None


class Transfer(NamedTuple):
    """One message of this rank with a peer: what `action` takes in."""

    sends: bool
    peer: int
    action: Action


class Exchange(NamedTuple):
    """Transfers that start together and do not wait for each other."""

    transfers: tuple[Transfer, ...]


Program = list[Action | Exchange]


@cache
def training_programs(ranks: int, per_rank: int, microbatches: int) -> tuple[Program, ...]:
    """For each rank what one step is: forward and backward of all microbatches."""
    orders = [_order_1f1b(rank, ranks, per_rank, microbatches) for rank in range(ranks)]
    return _with_exchanges(orders, ranks * per_rank)


@cache
def evaluation_programs(ranks: int, per_rank: int) -> tuple[Program, ...]:
    """For each rank one microbatch forward, through all stages."""
    stages = ranks * per_rank
    orders = [[Action(FORWARD, 0, s) for s in range(r, stages, ranks)] for r in range(ranks)]
    return _with_exchanges(orders, stages)


def _order_1f1b(rank: int, ranks: int, per_rank: int, microbatches: int) -> list[Action]:
    """1F1B, and interleaved where a rank has several stages (Narayanan et al. 2021)."""
    total = microbatches * per_rank
    forward = [_action(FORWARD, i, rank, ranks, per_rank) for i in range(total)]
    backward = [_action(BACKWARD, i, rank, ranks, per_rank) for i in range(total)]
    behind = ranks - rank - 1
    if per_rank > 1:
        behind = 2 * behind + (per_rank - 1) * ranks
    ahead = min(behind, total)
    actions = forward[:ahead]
    for position in range(total - ahead):
        actions += [forward[ahead + position], backward[position]]
    return actions + backward[total - ahead :]


def _action(direction: str, position: int, rank: int, ranks: int, per_rank: int) -> Action:
    """The action at a position of a rank's forward or backward order: P microbatches a stage."""
    if per_rank == 1:
        return Action(direction, position, rank)
    group, inside = divmod(position, ranks * per_rank)
    chunk, offset = divmod(inside, ranks)
    if direction == BACKWARD:
        chunk = per_rank - 1 - chunk
    return Action(direction, group * ranks + offset, chunk * ranks + rank)


def _with_exchanges(orders: list[list[Action]], stages: int) -> tuple[Program, ...]:
    """The ranks' orders with an exchange after each tick in which a message was made."""
    ranks = len(orders)
    programs: tuple[Program, ...] = tuple([] for _ in orders)
    rests: list[Iterator[Action]] = [iter(order) for order in orders]
    waiting = [next(rest, None) for rest in rests]
    arrived: set[Action] = set()
    while any(waiting):
        ready = [_is_ready(action, arrived, stages) for action in waiting]
        assert any(ready), f"these actions wait for each other: {waiting}"
        transfers: list[list[Transfer]] = [[] for _ in orders]
        for rank, action in enumerate(waiting):
            if action is None or not ready[rank]:
                continue
            programs[rank].append(action)
            waiting[rank] = next(rests[rank], None)
            if (target := action.target(stages)) is not None:
                peer = target.stage % ranks
                transfers[rank].append(Transfer(True, peer, target))
                transfers[peer].append(Transfer(False, rank, target))
        for program, exchange in zip(programs, transfers, strict=True):
            if exchange:
                program.append(Exchange(tuple(exchange)))
            arrived |= {t.action for t in exchange}
    return programs


def _is_ready(action: Action | None, arrived: set[Action], stages: int) -> bool:
    return action is not None and (action.source(stages) is None or action in arrived)
