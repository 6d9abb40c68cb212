"""Rotary positions stretched on request: transformers computes them, config.json notes it."""

from typing import Any

from atoll.errors import UserError
from atoll.settings import RopeScaling


def scale_positions(config: Any, scaling: RopeScaling) -> None:
    """Let a configuration take samples `factor` times as long (linear; YaRN: Peng et al. 2023).

    Raises `UserError` for positions that are not rotary, or not one plain kind for all layers.
    """
    rope = getattr(config, "rope_parameters", None)
    asked = (scaling.kind, scaling.factor)
    if isinstance(rope, dict) and (rope.get("rope_type"), rope.get("factor")) == asked:
        return  # an export of such a run
    plain = isinstance(rope, dict) and "rope_theta" in rope
    if not plain or rope.get("rope_type", "default") != "default":
        kind = rope.get("rope_type", "one for each kind of layer") if rope else "not rotary"
        raise UserError(
            f"model.rope_scaling={scaling.kind}: the positions of this {config.model_type} are "
            f"{kind}, which cannot be scaled again",
            "leave model.rope_scaling out, or give model.config.rope_parameters whole",
        )
    positions = config.max_position_embeddings
    scaled = rope | {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "yarn":
        scaled["original_max_position_embeddings"] = positions
    config.max_position_embeddings = int(positions * scaling.factor)
    config.rope_parameters = scaled
