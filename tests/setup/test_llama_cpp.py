"""llama.cpp's own converter reads exports, and makes of them what `export.gguf` makes.

The converter comes with the sources of llama-cpp-python, and is run with transformers 4.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pieces
import pytest
import small_export
from gguf import GGUFReader, TokenType
from transformers import AutoTokenizer

from atoll.train.write_gguf import write_gguf

SOURCES = "llama-cpp-python==0.3.16"
# It knows the tokenizers of published models by a digest of theirs, and imports mistral_common for
# files that no export has.
CONVERT = """
import sys
from unittest.mock import MagicMock
import transformers
assert transformers.__version__.startswith("4."), transformers.__version__
for part in ("", ".tokens", ".tokens.tokenizers", *(f".tokens.tokenizers.{name}" for name in
             ("base", "multimodal", "tekken", "sentencepiece"))):
    sys.modules["mistral_common" + part] = MagicMock()
import convert_hf_to_gguf as converter
converter.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
converter.main()
"""
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROPE,
    "mistral": ROPE | {"sliding_window": 64},
    "qwen2": ROPE | {"tie_word_embeddings": True},
    "qwen3": small_export.FAMILIES["qwen3"][0],
    "qwen3_moe": small_export.FAMILIES["qwen3_moe"][0] | {"norm_topk_prob": True},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
# what files say of themselves; how far a model goes, where Mistral's window is ours
SCORES = "tokenizer.ggml.scores"
OWN = ("general.", "GGUF.", "llama.context_length", SCORES)


@pytest.fixture(scope="session")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of llama.cpp's sources."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--no-binary=:all:", SOURCES], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        inside = [m for m in archive if "/llama.cpp/convert_hf" in m.name or "/gguf-py/" in m.name]
        archive.extractall(folder, inside, filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = GGUFReader(path)
    settings = {name: field.contents() for name, field in reader.fields.items()}
    return {tensor.name: tensor.data for tensor in reader.tensors}, settings


def merging(settings: dict[str, Any]) -> list[int]:
    """The tokens of several characters that stand for themselves, by their scores."""
    tokens, kinds = (settings[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    made = [id for id, token in enumerate(tokens) if kinds[id] == TokenType.NORMAL]
    return sorted((id for id in made if len(tokens[id]) > 1), key=lambda id: -settings[SCORES][id])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_it_makes_the_same_file_of_an_export(
    family: str,
    tmp_path: Path,
    converter: Path,
    transformers_4: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(small_export.FAMILIES, family, (FAMILIES[family], {}))
    gemma = family.startswith("gemma")
    words = AutoTokenizer.from_pretrained(pieces.write_gemma(tmp_path / "words")) if gemma else None
    folder = small_export.exported(tmp_path, family, words)
    paths = (transformers_4, converter, converter / "gguf-py")
    subprocess.run(
        [sys.executable, "-c", CONVERT, folder, "--outfile", tmp_path / "it", "--outtype", "f32"],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "HF_HUB_OFFLINE": "1"},
        check=True,
    )
    (tensors, settings), (ours, own) = (
        contents(path) for path in (tmp_path / "it", write_gguf(folder, "f32", "small"))
    )
    assert tensors.keys() == ours.keys()
    assert [name for name in tensors if not np.array_equal(tensors[name], ours[name])] == []
    if SCORES in settings:  # which pair of pieces merges first
        assert merging(settings) == merging(own) != []
    others = {name: value for name, value in settings.items() if own.get(name) != value}
    assert [name for name in others if not name.startswith(OWN)] == []
