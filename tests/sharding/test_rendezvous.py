"""The step of a pipeline among processes whose sends wait for their receiver, as NCCL's may."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from test_parity import Strategy, assert_same, chosen, one_process, train

from atoll.settings import Run
from atoll.sharding.process_group import World

READY = 1  # the tag of a receiver's word that it is there; messages themselves have none


class Over:
    def wait(self) -> None:
        """The exchange ended before it returned."""


def exchange_by_rendezvous(operations: list[dist.P2POp]) -> list[Over]:
    """Receives are called together; a send begins when its receiver has said so."""
    works: list[Any] = []
    for each in operations:
        if each.op is dist.irecv:
            word = torch.zeros(1)
            works.append(dist.isend(word, group=each.group, group_dst=each.group_peer, tag=READY))
            works.append(dist.irecv(each.tensor, group=each.group, group_src=each.group_peer))
    for each in operations:
        if each.op is dist.isend:
            dist.recv(torch.zeros(1), group=each.group, group_src=each.group_peer, tag=READY)
            works.append(dist.isend(each.tensor, group=each.group, group_dst=each.group_peer))
    for work in works:
        work.wait()
    return [Over()]


def train_by_rendezvous(world: World, run: Run) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", exchange_by_rendezvous)
        return train(world, run, 1.0)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("pipeline", {"pipeline": 4}, untied=True),
        Strategy("pipeline_interleaved", {}, untied=True),
    ],
    ids=str,
)
def test_no_rank_waits_for_ever(ranks: RankPool, strategy: Strategy) -> None:
    got = ranks.run(train_by_rendezvous, chosen(strategy, "llama", microbatches=4))
    assert_same(one_process("llama", 1.0, untied=True), got[0])
