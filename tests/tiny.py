"""Models and batches small enough for a test, made from seeds."""

from typing import Any

import torch

from atoll.data.batch import Batch

VOCABULARY = 128
SEQUENCE = 32

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 32,
        "word_embed_proj_dim": 16,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "bert": {
        "model_type": "bert",
        "is_decoder": True,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
for _config in CONFIGS.values():
    _config |= {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}


def batch(seed: int, samples: int = 1) -> Batch:
    """Samples of three documents each, cut at places that depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (samples, SEQUENCE), generator=generator)
    labels = torch.full_like(tokens, -100)
    positions = torch.zeros_like(tokens)
    lengths: list[int] = []
    for row in range(samples):
        first = int(torch.randint(2, 12, (), generator=generator))
        second = int(torch.randint(14, 30, (), generator=generator))
        for start, end in ((0, first), (first, second), (second, SEQUENCE)):
            labels[row, start : end - 1] = tokens[row, start + 1 : end]
            positions[row, start:end] = torch.arange(end - start)
            lengths.append(end - start)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(tokens, labels, positions, ends, tuple(lengths), tokens.numel())


def targets(batches: list[Batch]) -> int:
    return sum(int((b.labels_BT != -100).sum()) for b in batches)
