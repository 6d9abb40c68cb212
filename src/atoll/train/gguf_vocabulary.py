"""A tokenizer as llama.cpp reads it: tokens with their kinds, merges or scores, special tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import UserError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# how text is cut before merges, and whether whole tokens go before merges -> llama.cpp's name of it
CUTS = {
    (("bytes",), False): "gpt-2",
    (("digits", "bytes"), False): "smollm",
    ((CONTRACTIONS + r"\p{N}{1,3}" + REST,), True): "llama-bpe",
    ((CONTRACTIONS + r"\p{N}" + REST,), False): "qwen2",
}
SPACE = "\u2581"  # what SentencePiece has for a space
MODEL_OF = {True: "llama", False: "gpt2"}  # of bytes that are tokens; of text made of bytes


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says of a tokenizer, beside its special tokens."""

    model: str  # gpt2: merges of bytes; llama: SentencePiece's, by scores
    cut: str  # how text is cut before merges; default: of llama
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]
    puts_space: bool


def read_vocabulary(folder: Path) -> GgufVocabulary:
    """The tokenizer in a folder, of pairs of tokens that merge.

    Raises `UserError` for any other, and for one whose text is cut as none in llama.cpp.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"export.gguf: no tokenizer.json in {folder}", "export.gguf=false, or a fast tokenizer"
        )
    stored = json.loads(path.read_text())
    model = stored["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"export.gguf: a tokenizer of kind {model['type']}, where llama.cpp reads pairs that "
            "merge (BPE)",
            "export.gguf=false, or tokenizer.path= of one that does",
        )
    of_pieces = bool(model.get("byte_fallback"))
    added = {token["id"]: token for token in stored["added_tokens"]}
    by_id = {id: token for token, id in model["vocab"].items()}
    by_id |= {id: _written(token, of_pieces) for id, token in added.items()}
    tokens = [by_id.get(id, f"[PAD{id}]") for id in range(max(by_id) + 1)]
    kinds = [_kind(id, token, by_id, added, model) for id, token in enumerate(tokens)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return GgufVocabulary(
        model=MODEL_OF[of_pieces],
        cut="default" if of_pieces else _cut(stored),
        tokens=tokens,
        kinds=kinds,
        merges=[] if of_pieces else merges,
        scores=_scores(tokens, merges) if of_pieces else [],
        puts_space=of_pieces and _puts_space(path),
    )


def _written(token: dict[str, Any], of_pieces: bool) -> str:
    """An added token's text; llama.cpp gives back a user's piece as it stands in the file."""
    text = str(token["content"])
    return text.replace("▁", " ") if of_pieces and not token["special"] else text


def _kind(
    id: int, token: str, by_id: dict[int, str], added: dict[int, Any], model: dict[str, Any]
) -> int:
    from gguf import TokenType

    if id not in by_id:
        return int(TokenType.UNUSED)
    if id in added:
        return int(TokenType.CONTROL if added[id]["special"] else TokenType.USER_DEFINED)
    if token == model.get("unk_token"):
        return int(TokenType.UNKNOWN)
    if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
        return int(TokenType.BYTE)
    return int(TokenType.NORMAL)


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece takes the pair of the highest score first: that of the earliest merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        ranks.setdefault(left + right, rank)
    return [float(-ranks.get(token, len(merges))) for token in tokens]


def _cut(stored: dict[str, Any]) -> str:
    """What llama.cpp calls the way that a tokenizer of bytes cuts text."""
    given = stored["pre_tokenizer"] or {}
    steps = given.get("pretokenizers", [given])
    cuts = tuple(cut for cut in map(_of_step, steps) if cut)
    name = CUTS.get((cuts, bool(stored["model"].get("ignore_merges"))))
    if name is None:
        raise UserError(
            f"export.gguf: this tokenizer cuts text by {' then '.join(cuts) or 'nothing'}, which "
            "llama.cpp is not known to do",
            f"export.gguf=false, or a tokenizer that cuts as {', '.join(CUTS.values())}",
        )
    return name


def _of_step(step: dict[str, Any]) -> str | None:
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes" if step.get("use_regex", True) else None
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step["behavior"] == "Isolated":
        return str(step["pattern"].get("Regex"))
    return str(kind)


def _puts_space(path: Path) -> bool:
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(path)).encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(SPACE)
