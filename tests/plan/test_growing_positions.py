"""Positions that a model turns otherwise in long samples, and ranks with a part of each."""

from pathlib import Path
from typing import Any

import pytest
import small_run

from atoll.errors import UserError
from atoll.plan.growing_positions import check_growing_positions

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 16}
PHI = {"model_type": "phi3", "max_position_embeddings": 64, "rope_parameters": LONG}
DYNAMIC = {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic"}}
BY_LAYER = {
    "max_position_embeddings": 64,
    "rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}},
}


@pytest.mark.parametrize("config", [PHI, DYNAMIC, BY_LAYER])
def test_context_ranks_that_would_not_agree_are_refused(config: dict[str, Any]) -> None:
    run = small_run.settings(Path("/nowhere"), 2, sharding=small_run.sharding("context"))
    assert run.data.sequence_tokens == 32
    with pytest.raises(UserError, match=r"sharding.context=2: beyond 16 tokens") as caught:
        check_growing_positions(config, run)
    assert caught.value.hint == "sharding.context=1, or data.sequence_tokens=16"


def test_short_samples_and_whole_ones_are_not() -> None:
    context, whole = small_run.sharding("context"), small_run.sharding("ddp")
    folder = Path("/nowhere")
    short = small_run.settings(folder, 2, sharding=context, data__sequence_tokens=16)
    check_growing_positions(PHI, short)
    check_growing_positions(PHI, small_run.settings(folder, 2, sharding=whole))
    plain = {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "yarn"}}
    check_growing_positions(plain, small_run.settings(folder, 2, sharding=context))
