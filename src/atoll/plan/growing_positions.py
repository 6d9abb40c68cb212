"""Rotary positions whose frequencies follow the longest position of a call to the model.

transformers chooses them anew in each forward pass (modeling_rope_utils, `dynamic_rope_update`).
"""

from collections.abc import Mapping
from typing import Any

from atoll.errors import UserError
from atoll.plan.gguf_architectures import ropes
from atoll.settings import Run

KINDS = ("dynamic", "longrope")


def check_growing_positions(config: Mapping[str, Any], run: Run) -> None:
    """Refuse context ranks of which each would choose frequencies by its own part of a sample."""
    contexts, tokens = run.sharding.context, run.data.sequence_tokens
    for rope in ropes(dict(config)).values():
        kind = rope.get("rope_type", rope.get("type"))
        if contexts == 1 or kind not in KINDS:
            continue
        stated = "original_max_position_embeddings"
        short = rope.get(stated) or config.get(stated) or config["max_position_embeddings"]
        if tokens > short:
            raise UserError(
                f"sharding.context={contexts}: beyond {short} tokens this model turns positions "
                f"otherwise ({kind}), and ranks with parts of {tokens} tokens would not agree",
                f"sharding.context=1, or data.sequence_tokens={short}",
            )
