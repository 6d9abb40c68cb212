"""`atoll tokenize RUN_FOLDER`: text becomes token shards, once for all runs that share it.

The caller cuts the input into blocks and writes shards; processes read and encode the blocks.
Every byte depends on the settings and the text alone: not on the number of processes, nor on
how often the work was interrupted.
"""

import argparse
import errno
import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll import run_dir
from atoll.data import shards, sources, vocabulary
from atoll.data.keyed_hash import fractions, keyed
from atoll.data.shards import Manifest, Plan, Shard, ShardWriter, Split
from atoll.data.sources import Block, Input
from atoll.data.vocabulary import Vocabulary
from atoll.data.workers import cores, ordered_map
from atoll.errors import UserError
from atoll.settings import Run, load_run

Log = Callable[[str], None]
# Small batches stay in the processor's caches: 64 KiB was fastest of 16 KiB to 4 MiB.
BATCH_CHARACTERS = 64 << 10
# Fewer bytes of text in a token than real tokenizers reach only on the longest words.
TEXT_BYTES_PER_TOKEN = 6
DOCUMENTS_PER_TRAINING_BLOCK = 64
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Reading:
    """One input, cut into blocks, and the splits its documents go to."""

    text: Input
    blocks: list[Block]
    splits: tuple[Split, ...]
    held_out_fraction: float
    seed: int

    @property
    def documents(self) -> int:
        return sum(block.documents for block in self.blocks)

    @property
    def bytes(self) -> int:
        return sum(span.stop - span.start for block in self.blocks for span in block.spans)

    def held_out(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Which documents are validation: chosen by number, so the same in every process."""
        numbers = np.arange(first, first + count, dtype=np.uint64)
        if self.splits == ("train", "validation"):
            return fractions(keyed(self.seed, numbers)) < self.held_out_fraction
        return np.full(count, self.splits == ("validation",))


class Job(NamedTuple):
    """One block of one reading."""

    reading: int
    block: Block


class Encoded(NamedTuple):
    """A block's tokens for each split: documents end to end, and the length of each."""

    tokens: dict[Split, bytes]
    lengths: dict[Split, npt.NDArray[np.int64]]
    blank: int


def main(argv: list[str]) -> int:
    """Prepare the data of a run."""
    parser = argparse.ArgumentParser(prog="atoll tokenize", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--verify", action="store_true", help="compare every shard's sha256")
    arguments = parser.parse_args(argv)
    run = load_run(run_dir.settings_file(arguments.run_folder))
    prepare(run, lambda line: print(line, flush=True))
    if arguments.verify:
        open_prepared(run, verify=True)
        print("every shard matches its sha256", flush=True)
    return 0


def prepare(run: Run, log: Log) -> Path:
    """Tokenise the data of a run, unless that is done already, and give the folder.

    What an interrupted call left whole is kept. Raises `UserError` for missing or empty data,
    an unusable tokenizer, an empty split, or a full disk.
    """
    folder = run_dir.prepared(run)
    texts = _inputs(run)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, log):
        if _is_fresh(folder, run, texts):
            log(f"tokens are ready: {folder}")
            return folder
        readings = [_reading(run, text, splits) for splits, text in texts.items()]
        _refuse_empty_splits(run, readings)
        _refuse_small_disk(folder, readings)
        with shards.naming_a_full_disk(folder, _expected_bytes(readings)):
            plan = _begin(folder, run, readings, log)
            blank = _write_shards(folder, run, plan, readings, log)
            manifest = _manifest(folder, plan, readings, blank)
            _refuse_empty_manifest(run, manifest)
            shards.write_manifest(folder, manifest)
    log(
        f"tokens are ready: {folder}: {manifest.tokens('train'):,} to train on, "
        f"{manifest.tokens('validation'):,} held out, {manifest.vocabulary_tokens:,} in the vocabulary"
    )
    return folder


def open_prepared(
    run: Run, *, verify: bool = False, rank: int = 0, world_size: int = 1
) -> Manifest:
    """The manifest of a run's tokens, after a check that every shard is there at its full size.

    With `verify` this rank also compares the sha256 of its part of the shards. Raises
    `UserError` naming the shard that is missing, cut short or corrupted.
    """
    folder = run_dir.prepared(run)
    manifest = shards.read_manifest(folder)
    shards.refuse_wrong_sizes(folder, manifest)
    if verify:
        shards.refuse_wrong_content(folder, manifest, rank, world_size)
    return manifest


def _inputs(run: Run) -> dict[tuple[Split, ...], Input]:
    train = sources.train_input(run.data)
    validation = sources.validation_input(run.data)
    if validation is None:
        return {("train", "validation"): train}
    sources.refuse_overlap(train, validation)
    return {("train",): train, ("validation",): validation}


def _reading(run: Run, text: Input, splits: tuple[Split, ...]) -> Reading:
    data = run.data
    blocks = list(sources.blocks(text, data.documents_per_shard, data.max_documents))
    return Reading(text, blocks, splits, data.validation.fraction or 0.0, run.seed)


def _refuse_empty_splits(run: Run, readings: list[Reading]) -> None:
    """Find an empty split by counting, before any work is done."""
    for reading in readings:
        if reading.documents == 0:
            raise UserError(
                f"no documents for {' and '.join(reading.splits)}: the text is empty",
                "give data.files or data.hub that hold text",
            )
        held_out = int(reading.held_out(0, reading.documents).sum())
        counts = {"train": reading.documents - held_out, "validation": held_out}
        for split in reading.splits:
            if counts[split] == 0:
                raise _empty_split(run, split, reading.documents)


def _refuse_empty_manifest(run: Run, manifest: Manifest) -> None:
    """Find a split whose documents all turned out blank."""
    documents = sum(manifest.documents(split) for split in shards.SPLITS)
    for split in shards.SPLITS:
        if manifest.tokens(split) == 0:
            raise _empty_split(run, split, documents, manifest.blank_documents)


def _empty_split(run: Run, split: Split, documents: int, blank: int = 0) -> UserError:
    found = f"the {split} split is empty: of {documents} documents with text"
    if blank:
        found += f" (and {blank} blank ones)"
    if run.data.validation.fraction is None:
        return UserError(f"{found} none is in it", "give text for it that is not blank")
    return UserError(
        f"{found} none falls to it with data.validation.fraction = {run.data.validation.fraction}",
        "make more documents of the text with data.document=paragraph or line, or move "
        "data.validation.fraction towards one half",
    )


def _expected_bytes(readings: list[Reading]) -> int:
    """Least bytes on disk; real tokenizers need this to about three times as much."""
    text = sum(reading.bytes for reading in readings)
    return 2 * text // TEXT_BYTES_PER_TOKEN + 8 * sum(reading.documents for reading in readings)


def _refuse_small_disk(folder: Path, readings: list[Reading]) -> None:
    free, needed = shutil.disk_usage(folder).free, _expected_bytes(readings)
    present = sum(path.stat().st_size for path in folder.rglob("*.ds*"))
    if needed > free + present:
        raise UserError(
            f"too little room for the tokens in {folder}: {free:,} bytes free, "
            f"at least {needed - present:,} needed",
            "make room, or set folders.prepared to another file system",
        )


def _is_fresh(folder: Path, run: Run, texts: dict[tuple[Split, ...], Input]) -> bool:
    if not shards.manifest_file(folder).exists() or not _same_plan(folder, run, texts):
        return False
    try:
        shards.refuse_wrong_sizes(folder, shards.read_manifest(folder))
    except UserError:
        return False
    return True


def _same_plan(folder: Path, run: Run, texts: dict[tuple[Split, ...], Input]) -> bool:
    plan = shards.read_plan(folder)
    return plan is not None and _identity(run, texts) == {
        "format_version": plan.format_version,
        "settings_digest": plan.settings_digest,
        "input_fingerprints": plan.input_fingerprints,
        "tokenizer_fingerprint": plan.tokenizer_fingerprint,
    }


def _identity(run: Run, texts: dict[tuple[Split, ...], Input]) -> dict[str, Any]:
    return {
        "format_version": shards.FORMAT_VERSION,
        "settings_digest": run_dir.prepared_digest(run),
        "input_fingerprints": {"+".join(key): text.fingerprint for key, text in texts.items()},
        "tokenizer_fingerprint": vocabulary.fingerprint(run),
    }


def _begin(folder: Path, run: Run, readings: list[Reading], log: Log) -> Plan:
    """Take up an interrupted plan, or clear the folder, make the tokenizer and write a new one."""
    shards.remove_partial_files(folder)
    texts = {reading.splits: reading.text for reading in readings}
    plan = shards.read_plan(folder)
    if plan is not None and _same_plan(folder, run, texts):
        return plan
    _clear(folder)
    found = _make_tokenizer(folder, run, readings, log)
    plan = Plan(
        **_identity(run, texts),
        tokenizer_sha256=found.sha256,
        vocabulary_tokens=found.tokens,
        end_id=found.end_id,
        pad_id=found.pad_id,
        dtype=found.dtype,
    )
    shards.write_plan(folder, plan)
    return plan


def _clear(folder: Path) -> None:
    """Remove what other settings or other text left; the files that vouch for it go first."""
    for path in (shards.manifest_file(folder), shards.plan_file(folder)):
        path.unlink(missing_ok=True)
    run_dir.sync_folder(folder)
    for name in ("tokenizer", ".tokenizer.partial", *shards.SPLITS):
        shutil.rmtree(folder / name, ignore_errors=True)


def _make_tokenizer(folder: Path, run: Run, readings: list[Reading], log: Log) -> Vocabulary:
    name = vocabulary.origin(run)
    what = "training the tokenizer" if name is None else f"loading the tokenizer of {name}"
    log(f"{what} …")
    began = time.monotonic()
    partial_folder = folder / ".tokenizer.partial"
    # In a process of its own: neither its threads nor torch stay in this one.
    start = partial(_tokenizer_maker, run, readings[0], partial_folder)
    (found,) = ordered_map(start, [None], workers=1, threads=run.data.workers or cores())
    shards.sync_all(partial_folder)
    partial_folder.replace(shards.tokenizer_folder(folder))
    run_dir.sync_folder(folder)
    log(f"tokenizer: {found.tokens:,} tokens, {time.monotonic() - began:.1f} s")
    return found


def _tokenizer_maker(
    run: Run, reading: Reading, folder: Path
) -> Callable[[None], Vocabulary]:
    def make(_: None) -> Vocabulary:
        if vocabulary.origin(run) is None:
            texts = _training_texts(run, reading)
            made = vocabulary.trained(texts, run.tokenizer.vocabulary_tokens)
        else:
            made = vocabulary.load(run)
        vocabulary.save(made, folder)
        return vocabulary.describe(folder)

    return make


def _training_texts(run: Run, reading: Reading) -> Iterator[str]:
    """Documents of the training split, evenly taken from the whole input."""
    wanted = run.tokenizer.training_documents
    blocks = reading.blocks
    each = max(DOCUMENTS_PER_TRAINING_BLOCK, -(-wanted // len(blocks)))
    every = 1 if wanted >= reading.documents else max(1, len(blocks) * each // wanted)
    taken = 0
    for block in blocks[::every]:
        held_out = reading.held_out(block.first_document, block.documents)
        found = [
            text
            for text, away in zip(sources.texts(reading.text, block), held_out, strict=True)
            if text and not away
        ]
        if wanted < reading.documents:
            found = found[:: max(1, len(found) // each)][: min(each, wanted - taken)]
        taken += len(found)
        yield from (_filled(run.data.template, text) for text in found)


def _write_shards(
    folder: Path, run: Run, plan: Plan, readings: list[Reading], log: Log
) -> int:
    """Encode every block of the shards that are not whole yet; give the count of blank documents."""
    jobs = [Job(number, block) for number, reading in enumerate(readings)
            for block in _missing_blocks(folder, plan, reading)]  # fmt: skip
    if not jobs:
        return _blank(folder, readings)
    workers = min(run.data.workers or cores(), len(jobs))
    start = partial(_encoder, folder, run, plan, [reading.text for reading in readings], readings)
    progress = _Progress(log, sum(job.block.documents for job in jobs))
    done = zip(jobs, ordered_map(start, jobs, workers), strict=True)
    for (number, shard), group in groupby(done, key=lambda pair: (pair[0].reading, pair[0].block.shard)):
        _write_shard(folder, plan, readings[number].splits, shard, group, progress)
    progress.finish()
    return 0
