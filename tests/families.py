"""A tiny configuration of each decoder that people train, with what is its own."""

from typing import Any

WIDTH, VOCABULARY = 64, 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}

# name -> (model type, what differs from COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama2": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 5,
            "layer_types": WINDOWS,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.5,
        },
    ),
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 5, "layer_types": WINDOWS}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "apertus": ("apertus", {}),
    "gpt_neox": ("gpt_neox", {}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "mixtral": ("mixtral", {"num_local_experts": 4} | BALANCED),
    "qwen3_moe": ("qwen3_moe", EXPERTS | BALANCED),
    "olmoe": ("olmoe", EXPERTS | BALANCED),
}
# one of each kind: scaled positions, norms of queries, caps and windows, experts
OF_EACH_KIND = ("llama3", "qwen3", "gemma2", "granite", "mixtral")


def config_of(name: str) -> dict[str, Any]:
    family, changes = FAMILIES[name]
    return {"model_type": family} | COMMON | changes
