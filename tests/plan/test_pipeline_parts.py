"""What a rank of a pipeline has: held against the stages that the product makes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_run
from torch import nn

from atoll.plan.pipeline_parts import Part, busiest, parts_of
from atoll.plan.shapes import shape_of
from atoll.sharding.pipeline import _owners


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("layers", [4, 5, 7, 9])
def test_ranks_have_the_blocks_that_the_trainer_gives_them(
    layers: int, stages_per_rank: int
) -> None:
    sharding = small_run.sharding("full_shard") | {"stages_per_rank": stages_per_rank}
    sharding |= {"pipeline": 2}
    run = small_run.settings(Path("/nowhere"), 2, sharding=sharding)
    hf = nn.Module()
    hf.head = nn.Linear(1, 1)
    names = SimpleNamespace(blocks="blocks", entrance=(), exit=("head",))
    owners = _owners(SimpleNamespace(hf=hf, parts=names), layers, 2 * stages_per_rank)
    expected = [
        Part(
            sum(owners[f"blocks.{block}"] % 2 == rank for block in range(layers)),
            int(owners["head"] % 2 == rank),
        )
        for rank in range(2)
    ]
    assert parts_of(run, replace(shape_of(run.model.config), layers=layers)) == tuple(expected)


def test_a_layer_more_is_not_beside_the_head() -> None:
    run = small_run.settings(
        Path("/nowhere"), 2, sharding=small_run.sharding("full_shard") | {"pipeline": 2}
    )
    shape = replace(shape_of(run.model.config), layers=3)
    assert list(parts_of(run, shape)) == [Part(2, 0), Part(1, 1)]


def test_others_wait_for_the_busiest_as_far_as_their_cores_are_idle() -> None:
    passes = [(2.0, 1.0), (4.0, 1.5), (3.0, 0.5)]
    assert busiest(passes) == (4.0, 1.5, 6.5)
    compute, memory, others = busiest(passes, waits=0.5)
    assert (compute, memory, others) == (pytest.approx(3.5), pytest.approx(1.25), 6.5)
    assert busiest([(2.0, 1.0)], waits=0.25) == (2.0, 1.0, 0.0)
