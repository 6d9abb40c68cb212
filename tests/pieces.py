"""SentencePiece tokenizers of a few words, as published models bring them."""

import json
from pathlib import Path
from typing import Any

import sentencepiece

WORDS = ("a ring of islands", "one lagoon", "a reef of coral in the wind")


def write_pieces(path: Path, tokens: int = 90, **settings: Any) -> Any:
    """The file in Meta's form, and what the library itself makes of it."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 20),
        model_prefix=str(path.with_suffix("")),
        model_type="bpe",
        vocab_size=tokens,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    path.with_suffix(".vocab").unlink()
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def write_gemma(folder: Path) -> Path:
    """A folder with a tokenizer in the form of Gemma's."""
    folder.mkdir()
    pieces = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
    ids = {f"{name}_id": id for name, id in pieces.items()}
    names = {f"{name}_piece": f"<{name}>" for name in pieces}
    bytes_too = {"byte_fallback": True, "add_dummy_prefix": False}
    user = {"user_defined_symbols": ["<mask>"]}
    write_pieces(folder / "tokenizer.model", 290, **ids, **names, **bytes_too, **user)
    tokens = {f"{name}_token": f"<{name}>" for name in pieces}
    config = tokens | {"tokenizer_class": "GemmaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
