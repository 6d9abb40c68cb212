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
import pytest
import small_export
from gguf import GGUFReader

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
}
# what files say of themselves; how far a model goes, where Mistral's window is ours
OWN = ("general.", "GGUF.", "llama.context_length")


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
    folder = small_export.exported(tmp_path, family)
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
    others = {name: value for name, value in settings.items() if own.get(name) != value}
    assert [name for name in others if not name.startswith(OWN)] == []
