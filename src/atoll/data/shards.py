"""Token shards on disk, in the layout that datatrove writes and nanotron reads.

FOLDER/
  manifest.json            written last: the folder is whole
  plan.json                what the shards are made from; written before the first
  tokenizer/               as Hugging Face saves it
  train/  validation/
    00000.ds               little-endian uint16 or uint32 tokens, documents end to end
    00000.ds.index         uint64: where each document ends, in tokens
    00000.ds.metadata      tokenizer|bytes per token, tokens, tokens for people
    00000.labels           float32: the label of each document, where they have one
    00000.json             this shard's record, written when all of these are whole
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.errors import UserError
from atoll.run_dir import sha256_of, sync_folder, write_whole

FORMAT_VERSION = 1
SPLITS: tuple["Split", ...] = ("train", "validation")
Split = Literal["train", "validation"]


class Record(BaseModel):
    """Facts read from a JSON file of a prepared folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(Record):
    """One shard of one split; without documents it has no files."""

    number: int
    documents: int
    blank_documents: int
    tokens: int
    largest_token: int
    tokens_sha256: str
    index_sha256: str
    labels_sha256: str | None = None


class Plan(Record):
    """What shards are made from: two folders with the same plan hold the same bytes."""

    format_version: int
    settings_digest: str
    input_fingerprints: dict[str, str]
    tokenizer_fingerprint: str
    tokenizer_sha256: str
    vocabulary_tokens: int
    end_id: int | None
    pad_id: int
    dtype: Literal["uint16", "uint32"]


class Manifest(Plan):
    """The plan and every shard that came of it."""

    train: list[Shard]
    validation: list[Shard]

    def shards(self, split: Split) -> list[Shard]:
        """The shards of a split that hold documents."""
        return [shard for shard in self._all(split) if shard.documents]

    def tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.shards(split))

    def blank(self, split: Split) -> int:
        return sum(shard.blank_documents for shard in self._all(split))

    @property
    def largest_token(self) -> int:
        return max(shard.largest_token for split in SPLITS for shard in self.shards(split))

    def _all(self, split: Split) -> list[Shard]:
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


def labels_file(folder: Path, split: Split, number: int) -> Path:
    return folder / split / f"{number:05d}.labels"


def record_file(folder: Path, split: Split, number: int) -> Path:
    return folder / split / f"{number:05d}.json"


class ShardWriter:
    """Collects the documents of one shard; nothing has its final name before `finish`."""

    def __init__(self, folder: Path, split: Split, number: int, dtype: str) -> None:
        self.path = tokens_file(folder, split, number)
        self.record = record_file(folder, split, number)
        self.number = number
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        self.hasher = hashlib.sha256()
        self.lengths: list[npt.NDArray[np.int64]] = []
        self.bytes = 0
        self.blank = 0
        self.labels: list[npt.NDArray[np.float32]] = []
        self.largest = -1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.partial.open("wb")

    def add(
        self,
        tokens: bytes,
        lengths: npt.NDArray[np.int64],
        blank: int,
        labels: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Append documents: their tokens end to end, and the length of each; count blank ones."""
        if labels is not None:
            self.labels.append(labels)
        self.file.write(tokens)
        self.hasher.update(tokens)
        self.lengths.append(lengths)
        self.bytes += len(tokens)
        self.blank += blank
        if tokens:
            self.largest = max(self.largest, int(np.frombuffer(tokens, dtype=self.dtype).max()))

    def finish(self) -> Shard:
        """Give the shard its final names, the record last."""
        ends = np.cumsum(np.concatenate([*self.lengths, np.zeros(0, dtype=np.int64)]))
        count = self.bytes // self.dtype.itemsize
        assert (int(ends[-1]) if len(ends) else 0) == count, "lengths and tokens disagree"
        index = ends.astype("<u8").tobytes()
        if len(ends):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.partial.replace(self.path)
            write_whole(self.path.with_name(self.path.name + ".index"), index)
            human = f"../tokenizer|{self.dtype.itemsize}\n{count}\n{count / 1e6:.2f} MT"
            write_whole(self.path.with_name(self.path.name + ".metadata"), human)
        labels = np.concatenate(self.labels).astype("<f4").tobytes() if self.labels else None
        if len(ends) and labels is not None:
            write_whole(self.path.with_suffix(".labels"), labels)
        shard = Shard(
            number=self.number,
            documents=len(ends),
            blank_documents=self.blank,
            tokens=count,
            largest_token=self.largest,
            tokens_sha256=self.hasher.hexdigest(),
            index_sha256=hashlib.sha256(index).hexdigest(),
            labels_sha256=None if labels is None else hashlib.sha256(labels).hexdigest(),
        )
        write_whole(self.record, _json(shard))
        return shard

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()
        self.partial.unlink(missing_ok=True)


def finished_shard(folder: Path, split: Split, number: int, dtype: str) -> Shard | None:
    """The record of a shard that is whole on disk, else nothing."""
    try:
        shard = Shard.model_validate_json(record_file(folder, split, number).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return None if any(_wrong_sizes(folder, split, shard, dtype)) else shard


def write_plan(folder: Path, plan: Plan) -> None:
    write_whole(plan_file(folder), _json(plan))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_whole(manifest_file(folder), _json(manifest))


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder, whole or under way; nothing where there is none to trust."""
    try:
        return Plan.model_validate_json(plan_file(folder).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def read_manifest(folder: Path) -> Manifest:
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
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            f"delete {folder}, then {hint}",
        ) from None


def refuse_wrong_tokenizer(folder: Path, plan: Plan) -> None:
    """Raise `UserError` unless the tokenizer is the one the tokens were, or will be, made with."""
    path = tokenizer_folder(folder) / "tokenizer.json"
    found = sha256_of(path)[:12] if path.is_file() else "missing"
    if found != plan.tokenizer_sha256[:12]:
        raise UserError(
            f"{path} is {found}, the tokens are of {plan.tokenizer_sha256[:12]}",
            f"delete {folder}, then run `atoll tokenize RUN_FOLDER`",
        )


def refuse_wrong_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise `UserError` naming the first shard that is missing or cut short."""
    for split in SPLITS:
        for shard in manifest.shards(split):
            for path, size, expected in _wrong_sizes(folder, split, shard, manifest.dtype):
                found = "is missing" if size is None else f"has {size} bytes instead of {expected}"
                raise UserError(
                    f"{path} {found}",
                    "run `atoll tokenize RUN_FOLDER`: it makes only what is missing",
                )


def refuse_wrong_content(folder: Path, manifest: Manifest, rank: int, world_size: int) -> None:
    """Read this rank's part of the shards; raise `UserError` naming one that has changed."""
    all_shards = [(split, shard) for split in SPLITS for shard in manifest.shards(split)]
    for split, shard in all_shards[rank::world_size]:
        vouched = {
            tokens_file(folder, split, shard.number): shard.tokens_sha256,
            index_file(folder, split, shard.number): shard.index_sha256,
            labels_file(folder, split, shard.number): shard.labels_sha256,
        }
        for path, expected in vouched.items():
            if expected is None:
                continue
            found = sha256_of(path)
            if found != expected:
                raise UserError(
                    f"{path} is corrupted: sha256 {found[:12]}… instead of {expected[:12]}…",
                    "delete it, then run `atoll tokenize RUN_FOLDER`: only it is made again",
                )


@contextmanager
def naming_a_full_disk(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn "no space left" and "quota exceeded" into a `UserError` with the numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise UserError(
            f"{error.strerror} while writing {folder}: {free:,} bytes free, "
            f"about {needed_bytes:,} needed in all",
            "make room, or set folders.prepared to another file system, then run it again",
        ) from None


def remove_partial_files(folder: Path) -> None:
    """Delete what an interrupted preparation left behind."""
    for path in folder.rglob(".*.partial"):
        path.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove what other settings or other text left; the files that vouch for it go first."""
    manifest_file(folder).unlink(missing_ok=True)
    plan_file(folder).unlink(missing_ok=True)
    sync_folder(folder)
    for name in ("tokenizer", ".tokenizer.partial", *SPLITS):
        shutil.rmtree(folder / name, ignore_errors=True)


def sync_all(folder: Path) -> None:
    """Make every file of a folder, and its name, survive a power cut."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _wrong_sizes(
    folder: Path, split: Split, shard: Shard, dtype: str
) -> Iterator[tuple[Path, int | None, int]]:
    if not shard.documents:
        return
    expected = {
        tokens_file(folder, split, shard.number): shard.tokens * np.dtype(dtype).itemsize,
        index_file(folder, split, shard.number): shard.documents * 8,
    }
    if shard.labels_sha256 is not None:
        expected[labels_file(folder, split, shard.number)] = shard.documents * 4
    for path, size in expected.items():
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            yield path, None, size
        else:
            if found != size:
                yield path, found, size


def _json(record: Record) -> str:
    content: dict[str, Any] = record.model_dump(mode="json")
    return json.dumps(content, indent=1, sort_keys=True) + "\n"
