"""How token shards are written: each whole or not at all, and what is cleared before."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.data import shards
from atoll.data.shards import Split, TokenShard
from atoll.errors import UserError
from atoll.run_dir import sync_folder, write_whole


class TokenBlock(NamedTuple):
    """Documents of one split: their tokens end to end, the length of each, how many are blank.

    learned: of conversations, a byte for each token: 1 where it is learned to be said.
    """

    tokens: bytes
    lengths: npt.NDArray[np.int64]
    blank: int
    labels: npt.NDArray[np.float32] | None = None
    learned: bytes | None = None
    cut: int = 0
    dropped: int = 0


class ShardWriter:
    """Collects the documents of one shard; nothing has its final name before `finish`."""

    def __init__(self, folder: Path, split: Split, number: int, dtype: str) -> None:
        self.path = shards.tokens_file(folder, split, number)
        self.record = shards.record_file(folder, split, number)
        self.number = number
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        self.hasher = hashlib.sha256()
        self.lengths = [np.zeros(0, dtype=np.int64)]
        self.labels: list[npt.NDArray[np.float32]] = []
        self.learned: list[bytes] = []
        self.blank = self.cut = self.dropped = 0
        self.largest = -1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.partial.open("wb")

    def add(self, block: TokenBlock) -> None:
        """Append the documents of a block."""
        self.file.write(block.tokens)
        self.hasher.update(block.tokens)
        self.lengths.append(block.lengths)
        self.blank += block.blank
        self.cut += block.cut
        self.dropped += block.dropped
        if block.learned is not None:
            self.learned.append(block.learned)
        if block.labels is not None:
            self.labels.append(block.labels)
        if block.tokens:
            largest = np.frombuffer(block.tokens, dtype=self.dtype).max()
            self.largest = max(self.largest, int(largest))

    def finish(self) -> TokenShard:
        """Give the shard its final names, the record last."""
        ends = np.cumsum(np.concatenate(self.lengths))
        tokens = int(ends[-1]) if len(ends) else 0
        assert self.file.tell() == tokens * self.dtype.itemsize, "lengths and tokens disagree"
        index = ends.astype("<u8").tobytes()
        labels = np.concatenate(self.labels).astype("<f4").tobytes() if self.labels else None
        learned = b"".join(self.learned) if self.learned else None
        assert learned is None or len(learned) == tokens, "tokens and their loss disagree"
        if len(ends):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.partial.replace(self.path)
            write_whole(self.path.with_suffix(".ds.index"), index)
            human = f"../tokenizer|{self.dtype.itemsize}\n{tokens}\n{tokens / 1e6:.2f} MT"
            write_whole(self.path.with_suffix(".ds.metadata"), human)
            if labels is not None:
                write_whole(self.path.with_suffix(".labels"), labels)
            if learned is not None:
                write_whole(self.path.with_suffix(".ds.loss"), learned)
        shard = TokenShard(
            number=self.number,
            documents=len(ends),
            blank_documents=self.blank,
            tokens=tokens,
            largest_token=self.largest,
            tokens_sha256=self.hasher.hexdigest(),
            index_sha256=hashlib.sha256(index).hexdigest(),
            labels_sha256=None if labels is None else hashlib.sha256(labels).hexdigest(),
            loss_sha256=None if learned is None else hashlib.sha256(learned).hexdigest(),
            cut_documents=self.cut,
            dropped_documents=self.dropped,
        )
        shard.write(self.record)
        return shard

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.partial.unlink(missing_ok=True)


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
    for path in [*folder.rglob(".*.partial")]:
        if path.is_dir():  # a tokenizer's
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove what other settings or other text left; the files that vouch for it go first."""
    shards.manifest_file(folder).unlink(missing_ok=True)
    shards.plan_file(folder).unlink(missing_ok=True)
    sync_folder(folder)
    for name in ("tokenizer", ".tokenizer.partial", *shards.SPLITS):
        shutil.rmtree(folder / name, ignore_errors=True)


def sync_all(folder: Path) -> None:
    """Make every file of a folder, and its name, survive a power cut."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
