"""A model without weights on the meta device, and the weights that belong into it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from atoll.errors import UserError
from atoll.models import attention
from atoll.models.causal_lm import CausalLM
from atoll.models.classifier import Classifier, classifies, new_head
from atoll.models.experts import autocast_experts
from atoll.models.mup import widths_of
from atoll.models.pair_ranker import PairRanker
from atoll.models.parts import check_family, parts_of
from atoll.models.positions import scale_positions
from atoll.models.source import load_config, local_folder
from atoll.models.weights import (
    ReadTensor,
    random_reader,
    scaled_reader,
    stored_reader,
    stored_rows,
)
from atoll.settings import Classes, Model, Task, Training, check_positions


def build_config(
    model: Model,
    vocabulary_tokens: int,
    sequence_tokens: int,
    special_ids: dict[str, int],
    added_tokens: int = 0,
) -> Any:
    """The checked Hugging Face configuration of a causal language model.

    added_tokens: how many of the vocabulary the model's embeddings may grow by. Raises `UserError`
    if the tokenizer or the sequence do not fit it.
    """
    sizes = (vocabulary_tokens, sequence_tokens, added_tokens)
    config = _checked_config(model, special_ids, *sizes)
    if config.model_type == "bert" and not config.is_decoder:
        raise UserError(
            "BERT learns to continue text only as a decoder, and its configuration says it is none",
            "set model.config.is_decoder=true",
        )
    return config


def classifier_config(
    model: Model,
    classes: Classes,
    vocabulary_tokens: int,
    sequence_tokens: int,
    pad_id: int,
    added_tokens: int = 0,
) -> Any:
    """The checked configuration of a classifier, with the names of its labels."""
    special_ids = {"pad_token_id": pad_id}
    sizes = (vocabulary_tokens, sequence_tokens, added_tokens)
    config = _checked_config(model, special_ids, *sizes)
    config.num_labels = len(classes.labels) or 1
    if classes.labels:
        config.id2label = dict(enumerate(classes.labels))
        config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "single_label_classification" if classes.labels else "regression"
    config.is_decoder = False
    return config


def _checked_config(
    model: Model,
    special_ids: dict[str, int],
    vocabulary_tokens: int,
    sequence_tokens: int,
    added_tokens: int,
) -> Any:
    config = load_config(model, special_ids)
    check_family(config)
    if model.rope_scaling is not None:
        scale_positions(config, model.rope_scaling)
    _fit_vocabulary(config, vocabulary_tokens, added_tokens)
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        check_positions(positions, sequence_tokens)
    return config


def _fit_vocabulary(config: Any, vocabulary_tokens: int, added_tokens: int) -> None:
    """Let embeddings grow by the tokens that are added; refuse a tokenizer with more."""
    if not hasattr(config, "vocab_size"):
        raise UserError(
            f"{config.model_type} has no vocabulary of its own: it reads more than text",
            "choose the text model of the family",
        )
    if 0 < vocabulary_tokens - config.vocab_size <= added_tokens:
        config.vocab_size = vocabulary_tokens
    if vocabulary_tokens > config.vocab_size:
        raise UserError(
            f"the tokenizer has {vocabulary_tokens} tokens, the model's vocabulary only "
            f"{config.vocab_size}",
            f"set model.config.vocab_size={vocabulary_tokens}, or use the model's own tokenizer",
        )


def build_model(
    config: Any, training: Training, separator_id: int | None = None, task: Task | None = None
) -> Any:
    """The model of a configuration on the meta device: shapes and ties, no memory.

    task: what its loss is, where it learns from pairs of answers.
    """
    hf = skeleton(config)
    autocast_experts(hf)
    parts = parts_of(hf)
    model: CausalLM | Classifier
    if classifies(config):
        model = Classifier(hf, parts, separator_id)
    elif task is not None:
        model = PairRanker(hf, parts, training.loss_chunk_tokens, task)
    else:
        terms = (training.loss_chunk_tokens, training.z_loss, training.compile)
        model = CausalLM(hf, parts, *terms)
    if training.activation_checkpointing != "none":
        # the older name goes with transformers 6, the newer one is not in every 5
        enable = getattr(model.hf, "activation_checkpointing_enable", None)
        enable = enable or model.hf.gradient_checkpointing_enable
        enable(_checkpointing_arguments(training.activation_checkpointing))
    return model.train()


@contextmanager
def weights_for(model: Model, config: Any, seed: int) -> Iterator[ReadTensor]:
    """The reader of the model's weights: of its source, or of random ones."""
    empty = skeleton(config)
    parts = parts_of(empty)
    random = random_reader(empty, parts, seed)
    if model.source is None:
        widths = widths_of(model.mup, empty, parts)
        yield random if widths is None else scaled_reader(random, widths)
        return
    folder = local_folder(model.source, model.revision)
    with stored_reader(folder, empty, new_head(config), random) as read:
        yield read


def replaced_head(model: Model, config: Any) -> str | None:
    """Of a source that gives another number of labels, a sentence: its head is not taken."""
    head = new_head(config)
    if head is None or model.source is None:
        return None
    rows = stored_rows(local_folder(model.source, model.revision), head)
    if rows is None or rows == config.num_labels:
        return None
    return f"the classifier of {model.source} has {rows} labels, the data {config.num_labels}"


def skeleton(config: Any) -> Any:
    """The Hugging Face model on the meta device, with attention of packed documents.

    Raises `UserError` for a family that computes its attention in a way of its own.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    attention.register()
    auto: Any = AutoModelForSequenceClassification if classifies(config) else AutoModelForCausalLM
    hf: Any = None
    try:
        with torch.device("meta"):
            hf = auto.from_config(
                config,
                attn_implementation=attention.NAME,
                dtype=torch.float32,
                trust_remote_code=False,
            )
    except KeyError as error:  # of a table of its own
        if attention.NAME not in str(error):
            raise
    if hf is None or not hf._supports_attention_backend:
        raise UserError(
            f"transformers computes the attention of {config.model_type} in a way of its own, "
            "which does not keep packed documents apart",
            "choose a model of another family: `atoll models` lists them",
        )
    hf.tie_weights()
    return hf


def _checkpointing_arguments(activation_checkpointing: str) -> dict[str, Any]:
    """Selective: keep what attention computed, recompute the rest of a block (as torchtitan)."""
    if activation_checkpointing == "full":
        return {"use_reentrant": False}
    keep_attention = partial(create_selective_checkpoint_contexts, attention.kept_operators())
    return {"use_reentrant": False, "context_fn": keep_attention}
