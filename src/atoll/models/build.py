"""A model without weights on the meta device, and the weights that belong into it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from atoll.errors import UserError
from atoll.models import attention
from atoll.models.causal_lm import CausalLM
from atoll.models.parts import parts_of
from atoll.models.source import load_config, local_folder
from atoll.models.weights import Reader, random_reader, stored_reader
from atoll.settings import Model, Training


def build_config(
    model: Model, vocabulary_tokens: int, sequence_tokens: int, special_ids: dict[str, int]
) -> Any:
    """The checked Hugging Face configuration of a causal language model.

    Raises `UserError` if the tokenizer or the sequence do not fit it.
    """
    config = load_config(model, special_ids)
    parts_of(config.model_type)
    if config.model_type == "bert" and not config.is_decoder:
        raise UserError(
            "BERT learns to continue text only as a decoder, and its configuration says it is none",
            "set model.config.is_decoder=true",
        )
    if vocabulary_tokens > config.vocab_size:
        raise UserError(
            f"the tokenizer has {vocabulary_tokens} tokens, the model's vocabulary only "
            f"{config.vocab_size}",
            f"set model.config.vocab_size={vocabulary_tokens}, or use the model's own tokenizer",
        )
    if sequence_tokens > config.max_position_embeddings:
        raise UserError(
            f"data.sequence_tokens ({sequence_tokens}) is more than the model's "
            f"max_position_embeddings ({config.max_position_embeddings})",
            f"set data.sequence_tokens={config.max_position_embeddings} or less",
        )
    return config


def build_model(config: Any, training: Training) -> CausalLM:
    """The model on the meta device: shapes and ties, no memory."""
    model = CausalLM(_skeleton(config), parts_of(config.model_type), training.loss_chunk_tokens)
    if training.recompute != "none":
        model.hf.gradient_checkpointing_enable(_recompute_arguments(training.recompute))
    return model.train()


@contextmanager
def weights_for(model: Model, config: Any, seed: int) -> Iterator[Reader]:
    """The reader of the model's weights: of its source, or of random ones."""
    skeleton = _skeleton(config)
    if model.source is None:
        yield random_reader(skeleton, parts_of(config.model_type), seed)
        return
    with stored_reader(local_folder(model.source, model.revision), skeleton) as read:
        yield read


def _skeleton(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    attention.register()
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.NAME, dtype=torch.float32
        )
    hf.tie_weights()
    return hf


def _recompute_arguments(recompute: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        arguments["context_fn"] = _keep_attention
    return arguments


def _keep_attention() -> Any:
    """Keep what attention computed and recompute the rest of the block (torchtitan's choice)."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    ]
    return create_selective_checkpoint_contexts(kept)
