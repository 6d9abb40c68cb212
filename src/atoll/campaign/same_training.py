"""Whether words of a run were changed in how it is carried out alone: that may change at any time.

A campaign lasts for months, in which a queue is renamed, an image built again, or a job turns out
to need more nodes, another sharding or more time. What is trained stays as it was begun with.
"""

from collections.abc import Sequence
from typing import Any

from atoll.config.compose import settings_of

# settings that decide no losses: what a run may resume with (config/identity.py), but for those
# that a campaign gives itself
HOW = (
    "confirm", "facility", "folders", "image", "launcher", "loggers", "monitor", "nodes",
    "override", "preflight", "ranks_per_node", "restart", "spare_nodes", "watch",
    "checkpoint.asynchronous", "checkpoint.every_steps", "checkpoint.keep", "data.workers",
    "training.activation_checkpointing", "training.compile", "training.log_every_steps",
    "training.loss_chunk_tokens", "training.microbatch_samples", "training.timeout_minutes",
)  # fmt: skip
SHARDING = "sharding"


def is_same_training(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether both lists of words set the same of all that decides losses."""
    return list(before) == list(now) or _what(before) == _what(now)


def _what(words: Sequence[str]) -> list[tuple[str, Any, bool]]:
    return [setting for setting in settings_of(words) if not _is_how(*setting)]


def _is_how(name: str, value: Any, is_choice: bool) -> bool:
    if "${" in str(value):
        return False
    if name == SHARDING and is_choice:  # one of the strategies; its words may have their own clip
        return True
    return any(name == how or name.startswith(f"{how}.") for how in HOW)
