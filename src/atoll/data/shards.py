"""Token shards on disk, in the layout that datatrove writes and nanotron reads.

FOLDER/
  manifest.json            written last: the folder is whole
  plan.json                what the shards are made from; written before the first
  tokenizer/               as Hugging Face saves it
  train/  validation/
    00000.ds               little-endian uint16 or uint32 tokens, documents end to end
    00000.ds.index         uint64: where each document ends, in tokens
    00000.ds.metadata      tokenizer|bytes per token, tokens, tokens for people
    00000.ds.loss          uint8: of conversations, 1 where a token is learned to be said, else 0
    00000.labels           float32: the label of each document, where they have one
    00000.json             this shard's record, written when all of these are whole
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.data.vocabulary import Vocabulary
from atoll.errors import UserError
from atoll.run_dir import digest, sha256_of, write_whole

FORMAT_VERSION = 2
SPLITS: tuple["Split", ...] = ("train", "validation")
Split = Literal["train", "validation"]


class Record(BaseModel):
    """Facts read from a JSON file of a prepared folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def write(self, path: Path) -> None:
        """The file is there whole or not at all."""
        facts = self.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(facts, indent=1, sort_keys=True)
        write_whole(path, text + "\n")


class TokenShard(Record):
    """One shard of one split; without documents it has no files."""

    number: int
    documents: int
    blank_documents: int
    tokens: int
    largest_token: int
    tokens_sha256: str
    index_sha256: str
    labels_sha256: str | None = None
    loss_sha256: str | None = None
    cut_documents: int = 0  # conversations longer than a sample: cut at a turn, or left out
    dropped_documents: int = 0


def text_digest(fingerprints: Mapping[str, str]) -> str:
    """Of the text that is trained on, by the fingerprints of a plan's texts."""
    return digest({split: text for split, text in fingerprints.items() if "train" in split}, 16)


class TokenPlan(Record):
    """What shards are made from: two folders with the same plan hold the same bytes."""

    format_version: int
    settings_digest: str
    input_fingerprints: dict[str, str]
    tokenizer_fingerprint: str
    tokenizer_sha256: str
    vocabulary_tokens: int
    begin_id: int | None
    end_id: int | None
    pad_id: int
    dtype: Literal["uint16", "uint32"]
    shard_counts: dict[Split, int] = {}  # of each split; none: of an earlier version

    @property
    def vocabulary(self) -> Vocabulary:
        ids = (self.begin_id, self.end_id, self.pad_id)
        return Vocabulary(self.vocabulary_tokens, *ids, self.tokenizer_sha256)


class TokenManifest(TokenPlan):
    """The plan and every shard that came of it."""

    train: list[TokenShard]
    validation: list[TokenShard]

    def shards(self, split: Split) -> list[TokenShard]:
        """The shards of a split that hold documents."""
        return [shard for shard in self._all(split) if shard.documents]

    def tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.shards(split))

    def blank(self, split: Split) -> int:
        return sum(shard.blank_documents for shard in self._all(split))

    def cut(self, split: Split) -> int:
        return sum(shard.cut_documents for shard in self._all(split))

    def dropped(self, split: Split) -> int:
        return sum(shard.dropped_documents for shard in self._all(split))

    def _all(self, split: Split) -> list[TokenShard]:
        return self.train if split == "train" else self.validation


def manifest_file(folder: Path) -> Path:
    return folder / "manifest.json"


def plan_file(folder: Path) -> Path:
    return folder / "plan.json"


def tokenizer_folder(folder: Path) -> Path:
    return folder / "tokenizer"


def tokens_file(folder: Path, split: Split, number: int) -> Path:
    return folder / split / f"{number:05d}.ds"


def index_file(folder: Path, split: Split, number: int) -> Path:
    return folder / split / f"{number:05d}.ds.index"


def loss_file(folder: Path, split: Split, number: int) -> Path:
    return folder / split / f"{number:05d}.ds.loss"


def labels_file(folder: Path, split: Split, number: int) -> Path:
    return folder / split / f"{number:05d}.labels"


def record_file(folder: Path, split: Split, number: int) -> Path:
    return folder / split / f"{number:05d}.json"


def finished_shard(folder: Path, split: Split, number: int, dtype: str) -> TokenShard | None:
    """The record of a shard that is whole on disk, else nothing."""
    try:
        shard = TokenShard.model_validate_json(record_file(folder, split, number).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    files = _files(folder, split, shard, dtype)
    return shard if all(_size(path) == size for path, size, _ in files) else None


def refuse_other_shard(folder: Path, split: Split, shard: TokenShard, dtype: str) -> None:
    """Raise `UserError` where a shard that is read from now on is not the one that was planned."""
    if finished_shard(folder, split, shard.number, dtype) != shard:
        raise made_again(folder)


def refuse_other_plan(folder: Path, plan: TokenPlan) -> None:
    """Raise `UserError` where the tokens of a folder are of another text than they were."""
    now = read_plan(folder)
    parts = {"input_fingerprints", "tokenizer_sha256"}
    if now is not None and now.model_dump(include=parts) != plan.model_dump(include=parts):
        raise made_again(folder)


def made_again(folder: Path) -> UserError:
    return UserError(
        f"the tokens in {folder} were made again, of another text, while this run reads them",
        "put the text back as it was and submit the same line again, or begin anew with another "
        "name=; runs on a text that changes need a data.name each",
    )


def read_plan(folder: Path) -> TokenPlan | None:
    """The plan of a folder, whole or under way; nothing where there is none to trust."""
    try:
        return TokenPlan.model_validate_json(plan_file(folder).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def read_manifest(folder: Path) -> TokenManifest:
    """The manifest of a prepared folder.

    Raises `UserError` where it is missing or of another version of the format.
    """
    path = manifest_file(folder)
    hint = "run `atoll tokenize RUN_FOLDER`"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"no tokens at {folder}: manifest.json is missing", hint) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", f"delete {folder}, then {hint}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} is of format version {version}, this is {FORMAT_VERSION}",
            f"delete {folder}, then {hint}",
        )
    try:
        return TokenManifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            f"delete {folder}, then {hint}",
        ) from None


def refuse_wrong_tokenizer(folder: Path, plan: TokenPlan) -> None:
    """Raise `UserError` unless the tokenizer is the one the tokens were, or will be, made with."""
    path = tokenizer_folder(folder) / "tokenizer.json"
    sha256 = sha256_of(path)[:12] if path.is_file() else "missing"
    if sha256 != plan.tokenizer_sha256[:12]:
        raise UserError(
            f"{path} is {sha256}, the tokens are of {plan.tokenizer_sha256[:12]}",
            f"delete {folder}, then run `atoll tokenize RUN_FOLDER`",
        )


def refuse_wrong_sizes(folder: Path, manifest: TokenManifest) -> None:
    """Raise `UserError` naming the first shard that is missing or cut short."""
    for split in SPLITS:
        for shard in manifest.shards(split):
            for path, expected, _ in _files(folder, split, shard, manifest.dtype):
                size = _size(path)
                if size == expected:
                    continue
                raise UserError(
                    f"{path} is missing"
                    if size is None
                    else f"{path} has {size} bytes instead of {expected}",
                    "run `atoll tokenize RUN_FOLDER`: it makes only what is missing",
                )


def refuse_wrong_content(folder: Path, manifest: TokenManifest, rank: int, world_size: int) -> None:
    """Read this rank's part of the shards; raise `UserError` naming one that has changed."""
    all_shards = [(split, shard) for split in SPLITS for shard in manifest.shards(split)]
    for split, shard in all_shards[rank::world_size]:
        for path, _, expected in _files(folder, split, shard, manifest.dtype):
            sha256 = sha256_of(path)
            if sha256 != expected:
                raise UserError(
                    f"{path} is corrupted: sha256 {sha256[:12]}… instead of {expected[:12]}…",
                    "delete it, then run `atoll tokenize RUN_FOLDER`: only it is made again",
                )


def _files(
    folder: Path, split: Split, shard: TokenShard, dtype: str
) -> Iterator[tuple[Path, int, str]]:
    """The files of a shard, each with its size in bytes and its sha256."""
    if shard.documents:
        token_bytes = np.dtype(dtype).itemsize
        number = shard.number
        yield tokens_file(folder, split, number), shard.tokens * token_bytes, shard.tokens_sha256
        yield index_file(folder, split, number), shard.documents * 8, shard.index_sha256
        if shard.loss_sha256 is not None:
            yield loss_file(folder, split, number), shard.tokens, shard.loss_sha256
        if shard.labels_sha256 is not None:
            yield labels_file(folder, split, number), shard.documents * 4, shard.labels_sha256


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
