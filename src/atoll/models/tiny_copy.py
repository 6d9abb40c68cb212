"""A configuration of the same kind with small sizes: what is a family's own stays as it is."""

from typing import Any

from atoll.errors import UserError, first_line

TOKENS, VOCABULARY, HEADS, HEAD_DIM = 32, 128, 4, 16
# what a size is called -> how large it is in the copy
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2 * TOKENS,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "max_window_layers": 1,
    "first_k_dense_replace": 1,
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# lists that have an entry for each layer
BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


def tiny_copy(config: Any) -> Any:
    """Two layers of width 64; raises `UserError` where the family cannot be made so small."""
    stored = config.to_dict()
    changes: dict[str, Any] = {
        name: size for name, size in SIZES.items() if stored.get(name) is not None
    }
    heads, kv_heads = stored.get("num_attention_heads"), stored.get("num_key_value_heads")
    if kv_heads is not None:
        changes["num_key_value_heads"] = HEADS if kv_heads == heads else min(kv_heads, 2)
    changes |= {name: _two_of(stored[name]) for name in BY_LAYER if stored.get(name)}
    if by_layer := stored.get("per_layer_config"):
        changes["per_layer_config"] = {1: _twice_as_large(next(iter(by_layer.values())))}
    changes |= dict.fromkeys(TOKEN_IDS, 1)
    if isinstance(stored.get("rope_parameters"), dict):
        changes["rope_parameters"] = _short_lists(stored["rope_parameters"])
    values = stored | changes
    for name in ("dtype", "architectures", "problem_type", "id2label", "label2id"):
        values.pop(name, None)
    try:
        return type(config)(**values)
    except Exception as error:  # each family checks its own numbers in its own way
        raise UserError(
            f"no small copy of a {config.model_type} could be made to try it with: "
            f"{type(error).__name__}: {first_line(error)[:200]}",
            "choose a model of a family that was tried: `atoll models` lists them",
        ) from error


def _two_of(entries: list[Any]) -> list[Any]:
    """Two layers, of both kinds where there are two."""
    first = entries[0]
    return [first, next((entry for entry in entries if entry != first), first)]


def _twice_as_large(sizes: dict[str, Any]) -> dict[str, Any]:
    """What differs in the second layer, from what the first has."""
    return {name: 2 * SIZES[name] if name in SIZES else size for name, size in sizes.items()}


def _short_lists(value: Any) -> Any:
    """Factors for each pair of a head's numbers, for as many as the copy has."""
    if isinstance(value, dict):
        return {name: _short_lists(inner) for name, inner in value.items()}
    return value[: HEAD_DIM // 2] if isinstance(value, list) else value
