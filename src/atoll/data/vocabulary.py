"""The tokenizer of a run: given by path or name, the model's own, or trained on the text."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atoll.data.sources.hub_reach import NO_ANSWER, use_cache_if_unreachable
from atoll.errors import UserError, first_line
from atoll.run_dir import sha256_of
from atoll.settings import Run

END_OF_TEXT = "<|endoftext|>"
# How tokenizers call the end of a text, where only their tokenizer.json is there to say it.
ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
PIECES = "tokenizer.model"
# Stand for what is no text; Gemma 3's is beyond the rows of its models that read text alone.
OTHER_MEDIA = ("image_token", "audio_token", "video_token")
# What a tokenizer is read from, in all the forms the hub knows.
FILES = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model",
    "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


class Vocabulary(NamedTuple):
    """What the tokens of a run mean: `tokens` is the largest id of a text's tokens + 1."""

    tokens: int
    begin_id: int | None  # nothing is put before documents where the tokenizer puts nothing
    end_id: int | None  # nothing is put between documents where the tokenizer knows no end
    pad_id: int
    sha256: str

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest of datatrove's two formats that holds every id."""
        return "uint16" if self.tokens <= 1 << 16 else "uint32"


def origin(run: Run) -> str | None:
    """The folder or hub name of the tokenizer; nothing where it is trained."""
    return run.tokenizer.path or run.model.source


def fingerprint(run: Run) -> str:
    """A word that changes when another tokenizer would come out."""
    name = origin(run)
    if name is None:
        if run.tokenizer.kind == "characters":
            return "characters"
        made = run.tokenizer
        return f"{made.kind} {made.vocabulary_tokens} {made.training_documents}"
    path = Path(name).expanduser()
    if path.is_file():
        return sha256_of(path)
    if not path.is_dir():
        return f"{name} {_revision(run)}"
    files = sorted({file for pattern in FILES for file in path.glob(pattern) if file.is_file()})
    hasher = hashlib.sha256()
    for file in files:
        hasher.update(f"{file.relative_to(path)} {sha256_of(file)}\n".encode())
    return hasher.hexdigest()


def load(run: Run) -> Any:
    """The tokenizer named by `tokenizer.path`, else by `model.source`.

    Raises `UserError` where it cannot be found, or has no fast form.
    """
    name = origin(run)
    assert name is not None, "a tokenizer without an origin is trained"
    setting = "tokenizer.path" if run.tokenizer.path else "model.source"
    path = Path(name).expanduser()
    if path.is_absolute() and not path.exists():
        raise UserError(
            f"no such folder: {setting}={name}", "check the path, or name a hub's model"
        )
    try:
        tokenizer = _of_file(path) if path.is_file() else _of_folder_or_hub(run, name)
    except Exception as error:  # the library raises many kinds, from many layers below it
        why = f"{type(error).__name__}: {first_line(error)[:300]}"
        if not path.exists() and use_cache_if_unreachable():
            why = f"no such folder here, and {NO_ANSWER}"
        raise UserError(
            f"no tokenizer in {setting}={name}: {why}",
            "set tokenizer.path to a folder that holds tokenizer.json; where there is no network, "
            "save it elsewhere with save_pretrained and give that folder",
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {setting}={name} ({type(tokenizer).__name__}) has no fast form",
            "set tokenizer.path to a folder that holds tokenizer.json",
        )
    return tokenizer


def trained(texts: Iterable[str], vocabulary_tokens: int) -> Any:
    """A byte-level BPE trained on texts; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_tokens,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    names = ("eos_token", "bos_token", "pad_token")
    return _fast(tokenizer_object=bpe, **dict.fromkeys(names, END_OF_TEXT))


def wordpiece(texts: Iterable[str], vocabulary_tokens: int) -> Any:
    """BERT's kind: words and pieces of them, [CLS] before a text or two and [SEP] after each."""
    from tokenizers import BertWordPieceTokenizer, processors

    pieces: Any = BertWordPieceTokenizer(lowercase=False)
    pieces.train_from_iterator(texts, vocabulary_tokens, show_progress=False)
    ends = {name: pieces.token_to_id(name) for name in ("[SEP]", "[CLS]")}
    pieces._tokenizer.post_processor = processors.BertProcessing(*ends.items())
    special = {
        f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")
    }
    names = ["input_ids", "token_type_ids", "attention_mask"]  # as BERT's own
    return _fast(tokenizer_object=pieces._tokenizer, model_input_names=names, **special)


def characters(texts: Iterable[str]) -> Any:
    """Every character of the texts is a token, in the order of their code points; nothing else."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known = sorted(set().union(*texts))
    ids = {character: number for number, character in enumerate(known)}
    split = Tokenizer(models.WordLevel(ids, ""))
    split.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    split.decoder = decoders.Fuse()
    return _fast(tokenizer_object=split, clean_up_tokenization_spaces=False)


def add_tokens(tokenizer: Any, tokens: list[str], chat_template: str = "") -> None:
    """Give a tokenizer tokens that it lacks; texts that hold them are cut there first.

    Those that a chat template writes are no words of an answer. Raises `UserError` for one that
    the tokenizer has.
    """
    known = tokenizer.get_vocab()
    for token in tokens:
        if token in known:
            raise UserError(
                f"tokenizer.add_tokens: the tokenizer has {token!r} already",
                "leave it out of tokenizer.add_tokens",
            )
    for token in tokens:
        tokenizer.add_tokens([token], special_tokens=token in chat_template)


# kind -> how one is trained on texts, to so many tokens
TRAINED = {"bpe": trained, "wordpiece": wordpiece}


def save(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer as Hugging Face does, without how this machine came by it.

    transformers writes down where it was read from and whether the hub was in reach: the same
    tokens would have another digest on another machine. SentencePiece's own file, which
    llama.cpp's converter asks for, stays beside its tokenizer.json.
    """
    for key in ("is_local", "local_files_only", "vocab_file"):
        tokenizer.init_kwargs.pop(key, None)
    pieces = Path(getattr(tokenizer, "vocab_file", None) or "")
    # several templates go by name into tokenizer_config.json: no export has their folder
    several = isinstance(tokenizer.chat_template, dict)
    tokenizer.save_pretrained(str(folder), **({"save_jinja_files": False} if several else {}))
    if pieces.name == PIECES and pieces.is_file():
        shutil.copyfile(pieces, folder / PIECES)


def describe(folder: Path, bos: str = "auto") -> Vocabulary:
    """Read a saved tokenizer's ids and hash; bos: whether documents get a beginning (data.bos).

    Raises `UserError` where it knows no token that may end a document, or none to begin it.
    """
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast.from_pretrained(str(folder), trust_remote_code=False)
    # Encoders such as BERT separate texts rather than end them.
    ends = [saved.eos_token_id, saved.sep_token_id]
    end_id = next((token for token in ends if token is not None), None)
    if end_id is None and any(len(token) > 1 for token in saved.get_vocab()):
        raise UserError(
            "the tokenizer has neither an end-of-text nor a separator token",
            f"give it one: tokenizer.eos_token = '{END_OF_TEXT}', then save_pretrained",
        )
    pad_id = (end_id or 0) if saved.pad_token_id is None else saved.pad_token_id
    begin_id, digest = _begin_id(folder, bos), sha256_of(folder / "tokenizer.json")
    return Vocabulary(_tokens_of_text(saved), begin_id, end_id, pad_id, digest)


def _tokens_of_text(tokenizer: Any) -> int:
    """The largest id + 1, without those at the end that stand for other media."""
    ids: dict[str, int] = tokenizer.get_vocab()
    no_text = {ids.get(getattr(tokenizer, name, None) or "") for name in OTHER_MEDIA}
    return max(id for id in ids.values() if id not in no_text) + 1


def _begin_id(folder: Path, bos: str) -> int | None:
    """What is put before each document: auto, what whoever loads the tokenizer gets there."""
    from transformers import AutoTokenizer

    if bos == "never":
        return None
    saved = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    begin_id: int | None = saved.bos_token_id
    if bos == "always":
        if begin_id is None:
            raise UserError(
                "data.bos=always, and the tokenizer has no beginning-of-text token",
                "data.bos=auto, or give it one: tokenizer.bos_token = '<s>', then save_pretrained",
            )
        return begin_id
    puts_it = begin_id is not None and saved("a")["input_ids"][:1] == [begin_id]
    return begin_id if puts_it and saved("a", add_special_tokens=False)["input_ids"] else None


def _of_folder_or_hub(run: Run, name: str) -> Any:
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    if not folder.is_dir():
        use_cache_if_unreachable()
    where = str(folder) if folder.is_dir() else name
    revision = _revision(run) or "main"
    return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)


def _of_file(path: Path) -> Any:
    """A tokenizer.json on its own."""
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(path)).get_vocab()
    end = next((token for token in ENDS if token in known), None)
    return _fast(tokenizer_file=str(path), **({"eos_token": end, "pad_token": end} if end else {}))


def _fast(**settings: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    return make(**settings)


def _revision(run: Run) -> str | None:
    return None if run.tokenizer.path else run.model.revision
