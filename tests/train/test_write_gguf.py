"""GGUF files: read back by transformers, their logits are the export's."""

import json
from pathlib import Path
from typing import Any

import pytest
import small_export
import torch
from gguf import GGUFReader, TokenType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atoll.errors import UserError
from atoll.plan.gguf_architectures import check_computed_alike
from atoll.train.gguf_vocabulary import read_vocabulary
from atoll.train.write_gguf import write_gguf

ROPE = {"rope_type": "default", "rope_theta": 2e4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# model type -> what is its own; of llama.cpp's there is no choice in it
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": ROPE},
    "mistral": {"rope_parameters": ROPE, "sliding_window": 64},
    "qwen2": {"rope_parameters": ROPE, "tie_word_embeddings": True},
    "qwen3": {"rope_parameters": ROPE, "head_dim": 128},
    "qwen3_moe": {"rope_parameters": ROPE, "head_dim": 16, "norm_topk_prob": True} | EXPERTS,
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6},
}
# what transformers' reader leaves to its defaults (scales of queries, widths of experts) is given
GIVEN = ("qwen3_moe", "gemma2", "gemma3_text")
TOLERANCE = {"f32": 1e-5, "f16": 3e-3, "bf16": 3e-2, "q8_0": 3e-2}
IDS = torch.arange(3, 43).view(2, 20)


def export_of(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch, **own: Any) -> Path:
    changes = FAMILIES[family] | own
    monkeypatch.setitem(small_export.FAMILIES, family, (changes, {}))
    return small_export.exported(folder, family)


def logits(folder: Path, **loading: Any) -> torch.Tensor:
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **loading).eval()
    with torch.no_grad():
        return torch.as_tensor(hf(IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_export(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_of(tmp_path, family, monkeypatch)
    expected = logits(folder)
    path = write_gguf(folder, "f32", "small")
    given = {"config": AutoConfig.from_pretrained(folder)} if family in GIVEN else {}
    read = logits(folder, gguf_file=path.name, **given)
    assert (read - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("format", ["f16", "bf16", "q8_0"])
def test_formats_are_as_near_as_they_are_wide(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_of(tmp_path, "llama", monkeypatch)
    expected = logits(folder)
    path = write_gguf(folder, format, "small")
    read = logits(folder, gguf_file=path.name)
    assert (read - expected).abs().max() <= TOLERANCE[format] * expected.abs().max()
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == format.upper()
    assert kinds["output_norm.weight"] == "F32"


def test_llama_3s_positions_are_factors_of_frequencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = small_export.LLAMA3 | {"rope_theta": 5e5}
    folder = export_of(tmp_path, "llama", monkeypatch, rope_parameters=rope)
    hf = AutoModelForCausalLM.from_pretrained(folder)
    scaled = hf.model.rotary_emb.inv_freq
    tensors = {t.name: t.data for t in GGUFReader(write_gguf(folder, "f32", "small")).tensors}
    width = 2 * len(scaled)
    plain = 5e5 ** -(torch.arange(0, width, 2) / width)
    factors = torch.tensor(tensors["rope_freqs.weight"])
    assert torch.allclose(plain / factors, scaled)
    assert factors.max() == pytest.approx(small_export.LLAMA3["factor"])


def test_the_tokenizer_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_of(tmp_path, "qwen2", monkeypatch)
    path = write_gguf(folder, "f32", "small")
    fields = GGUFReader(path).fields
    own: Any = AutoTokenizer.from_pretrained(folder)
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == own.eos_token_id
    assert fields["tokenizer.chat_template"].contents() == own.chat_template
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == small_export.SMALL["vocab_size"], "rows without a token have a name too"
    assert tokens[: len(own)] == own.convert_ids_to_tokens(range(len(own)))
    turn = own.convert_tokens_to_ids("<|turn|>")
    assert fields["tokenizer.ggml.token_type"].contents()[turn] == TokenType.CONTROL
    stored = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in stored]


def test_pieces_with_bytes_have_the_scores_of_their_merges(tmp_path: Path) -> None:
    tokens = ["<unk>", "<0x41>", "\u2581", "a", "b", "ab", "\u2581ab"]
    model = {
        "type": "BPE",
        "byte_fallback": True,
        "unk_token": "<unk>",
        "vocab": {token: id for id, token in enumerate(tokens)},
        "merges": [["a", "b"], ["\u2581", "ab"]],
    }
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    content = {"model": model, "added_tokens": [], "pre_tokenizer": None, "normalizer": prepend}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"version": "1.0"}))
    words = read_vocabulary(tmp_path)
    assert (words.model, words.cut, words.puts_space) == ("llama", "default", True)
    assert words.scores == [-2, -2, -2, -2, -2, 0, -1]
    assert words.kinds == [TokenType.UNKNOWN, TokenType.BYTE, *[TokenType.NORMAL] * 5]


def test_runs_of_spaces_among_pieces_are_written_as_they_are_given_back(tmp_path: Path) -> None:
    """Gemma's are pieces of its user's, which llama.cpp copies from the file as they are."""
    tokens = ["<unk>", "\u2581\u2581", "<turn>", "\u2581"]
    added = [
        {"id": 1, "content": "\u2581\u2581", "special": False},
        {"id": 2, "content": "<turn>", "special": True},
    ]
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": []}
    model["vocab"] = {token: id for id, token in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {"model": model, "added_tokens": [flags | token for token in added]}
    content |= {"pre_tokenizer": None, "normalizer": None, "version": "1.0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    words = read_vocabulary(tmp_path)
    assert words.tokens == ["<unk>", "  ", "<turn>", "\u2581"]
    assert words.kinds[1:3] == [TokenType.USER_DEFINED, TokenType.CONTROL]


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"type": "WordPiece", "vocab": {"a": 0}}, "of kind WordPiece"),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": []}, "cuts text by Whitespace"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(
    model: dict[str, Any], what: str, tmp_path: Path
) -> None:
    content = {"model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=what):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "opt"}, "of a model of type 'opt'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen3", "rope_parameters": {"rope_type": "llama3"}}, "rope_type=llama3"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types="),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 144}, "query_pre_attn_scalar=144"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 2e4}, "rope_local_base_freq=2"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "norm_topk_prob=False"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(config: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        check_computed_alike(config)
