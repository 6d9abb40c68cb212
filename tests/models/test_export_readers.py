"""What other programs, and transformers before 5, find in an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import small_export
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from atoll.models.export_config import write_config
from atoll.models.tiny_copy import tiny_copy


@pytest.mark.parametrize("family", small_export.FAMILIES)
def test_both_generations_fields_are_there(family: str, tmp_path: Path) -> None:
    folder = small_export.exported(tmp_path, family)
    stored = json.loads((folder / "config.json").read_text())
    older = small_export.FAMILIES[family][1]
    assert {name: stored.get(name) for name in older} == older
    assert stored["dtype"] == stored["torch_dtype"] == "float32"
    rope = AutoConfig.for_model(
        family, **small_export.SMALL | small_export.FAMILIES[family][0]
    ).rope_parameters
    assert stored["rope_parameters"] == rope
    assert AutoConfig.from_pretrained(folder).rope_parameters == rope, (
        "transformers 5 reads the same"
    )


def test_a_family_that_only_transformers_5_has_is_read_by_it(tmp_path: Path) -> None:
    config = tiny_copy(AutoConfig.for_model("gemma4_text"))
    write_config(tmp_path, config)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters


def test_the_tokenizer_has_a_class_and_special_tokens_of_both(tmp_path: Path) -> None:
    folder = small_export.exported(tmp_path, "llama")
    stored = json.loads((folder / "tokenizer_config.json").read_text())
    assert stored["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert stored["additional_special_tokens"] == ["<|turn|>"]
    assert "extra_special_tokens" not in stored, "a list, which transformers 4 takes for a mapping"
    for read in (AutoTokenizer.from_pretrained(folder), tokenizer_of(folder)):
        assert "<|turn|>" in read.all_special_tokens
        assert read.apply_chat_template([{"content": "hm"}], tokenize=False) == "hm"


def test_a_tokenizer_keeps_each_of_its_chat_templates(tmp_path: Path) -> None:
    words = small_export.small_words()
    words.chat_template = {"default": words.chat_template, "tool_use": "{{ tools | tojson }}"}
    folder = small_export.exported(tmp_path, "llama", words)
    for read in (AutoTokenizer.from_pretrained(folder), tokenizer_of(folder)):
        assert read.chat_template == words.chat_template


def tokenizer_of(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def test_generation_settings_of_the_source_are_passed_on(tmp_path: Path) -> None:
    stored = json.loads(
        (small_export.exported(tmp_path, "llama") / "generation_config.json").read_text()
    )
    assert stored == {"eos_token_id": [1, 7], "temperature": 0.6}


# program -> keys of config.json that it reads of a Llama (vLLM: model_executor/models/llama.py and
# transformers_utils/config.py; llama.cpp: convert_hf_to_gguf.py, TextModel and LlamaModel)
READERS = {
    "vllm": (
        "architectures", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "num_hidden_layers", "intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta",
        "rope_scaling", "max_position_embeddings", "torch_dtype", "tie_word_embeddings",
    ),
    "llama.cpp": (
        "architectures", "num_hidden_layers", "max_position_embeddings", "hidden_size",
        "intermediate_size", "num_attention_heads", "num_key_value_heads", "rope_theta",
        "rms_norm_eps", "rope_scaling", "vocab_size", "head_dim",
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", READERS)
def test_keys_that_other_programs_read_are_there(program: str, tmp_path: Path) -> None:
    stored = json.loads((small_export.exported(tmp_path, "llama") / "config.json").read_text())
    assert [key for key in READERS[program] if stored.get(key) is None] == []
    # llama.cpp takes both spellings of the kind, and these numbers by these names
    scaling = {name: stored["rope_scaling"][name] for name in small_export.LLAMA3}
    assert scaling == small_export.LLAMA3
