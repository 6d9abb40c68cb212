"""Exports of small random models, as runs write them, for tests of their readers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.data import vocabulary
from atoll.models import export
from atoll.models.safetensor_files import file_name, write_tensors
from atoll.models.stored_names import as_stored

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
# model -> (its configuration, what transformers 4 is to read in it)
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "qwen3": (
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "head_dim": 16},
    ),
    "gemma3_text": (
        {
            "head_dim": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
        {
            "rope_theta": 2e6,
            "rope_local_base_freq": 3e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gpt_neox": (
        {
            "num_key_value_heads": None,
            "rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.5},
        },
        {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
    ),
    "qwen3_moe": (
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {"num_experts": 4, "rope_theta": 1e6},
    ),
    "stablelm": (
        {"rope_parameters": {"rope_theta": 3e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
    ),
}


def exported(folder: Path, family: str, words: Any = None) -> Path:
    """An export of random weights, as a run writes it, with the source's generation settings.

    words: its tokenizer, saved as it is; else a small one of its own.
    """
    config = AutoConfig.for_model(family, **SMALL | FAMILIES[family][0])
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tied = set(hf.all_tied_weights_keys)
    own = {name: p.detach() for name, p in hf.state_dict().items() if name not in tied}
    weights = as_stored(hf, own)
    tokenizer, source = folder / "tokenizer", folder / "source"
    vocabulary.save(words or small_words(), tokenizer)
    source.mkdir()
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 7], "temperature": 0.6}')
    final = folder / "export"
    final.mkdir()
    write_tensors(final / file_name(0, 1), weights)
    architecture = type(hf).__name__
    export.write_rest(
        final, config, architecture, torch.float32, [list(weights)], 1, tokenizer, source
    )
    return final


def small_words() -> Any:
    """A tokenizer of bytes, with a token and a chat template of its own."""
    made = vocabulary.trained(["the ring of islands around one lagoon"] * 3, 290)
    made.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    made.chat_template = "{{ messages[0]['content'] }}"
    return made
