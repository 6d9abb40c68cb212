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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from atoll import run_dir
from atoll.data import encode, shards, sources, vocabulary
from atoll.data.encode import Encoded, Job, Reading
from atoll.data.shards import Manifest, Plan, ShardWriter, Split
from atoll.data.sources import Block
from atoll.data.vocabulary import Vocabulary
from atoll.data.workers import cores, ordered_map
from atoll.errors import UserError
from atoll.settings import Run, load_run

Log = Callable[[str], None]
# A token is rarely made of more text than this: the least room the tokens can need.
TEXT_BYTES_PER_TOKEN = 6
SECONDS_BETWEEN_LINES = 5.0


class Work(NamedTuple):
    """A reading and its blocks; shards are numbered within it."""

    reading: Reading
    blocks: list[Block]

    @property
    def documents(self) -> int:
        return sum(block.documents for block in self.blocks)

    @property
    def shard_count(self) -> int:
        return self.blocks[-1].shard + 1


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
    if run.folders.bundle is not None and run_dir.bundle_manifest(run.folders.bundle).is_file():
        log(f"tokens are ready: {folder}")  # as they were when the bundle was made
        return folder
    try:
        readings = _readings(run)
    except UserError as error:
        # Tokens made where there was a network, or from text that has since been put away.
        if not _is_whole(folder):
            raise
        log(f"tokens are ready: {folder}; their text is out of reach: {error.found}")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, log):
        if _is_fresh(folder, _identity(run, readings)):
            log(f"tokens are ready: {folder}")
            return folder
        works = [_cut(run, reading) for reading in readings]
        _refuse_empty_split(run, works)
        needed = _least_bytes(works)
        _refuse_small_disk(folder, needed)
        with shards.naming_a_full_disk(folder, needed):
            plan = _begin(folder, run, works, log)
            _write_shards(folder, run, plan, works, log)
            manifest = _manifest(folder, plan, works)
            _refuse_blank_split(manifest)
            shards.write_manifest(folder, manifest)
    log(
        f"tokens are ready: {folder}: {manifest.tokens('train'):,} to train on, "
        f"{manifest.tokens('validation'):,} held out; vocabulary {manifest.vocabulary_tokens:,}"
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
    shards.refuse_wrong_tokenizer(folder, manifest)
    shards.refuse_wrong_sizes(folder, manifest)
    if verify:
        shards.refuse_wrong_content(folder, manifest, rank, world_size)
    return manifest


def _readings(run: Run) -> list[Reading]:
    train = sources.train_input(run.data)
    validation = sources.validation_input(run.data)
    if validation is None:
        fraction = run.data.validation.fraction or 0.0
        return [Reading(train, ("train", "validation"), fraction, run.seed)]
    sources.refuse_overlap(train, validation)
    return [Reading(train, ("train",), 0.0, 0), Reading(validation, ("validation",), 0.0, 0)]


def _cut(run: Run, reading: Reading) -> Work:
    data = run.data
    found = sources.blocks(reading.text, data.documents_per_shard)
    work = Work(reading, list(found))
    if not work.blocks:
        raise UserError(
            f"no documents for {' and '.join(reading.splits)}: the text is empty",
            "give data.files or data.hub that hold text",
        )
    return work


def _refuse_empty_split(run: Run, works: list[Work]) -> None:
    """Find by counting, before any work, that no document falls to a split."""
    fraction = run.data.validation.fraction
    if fraction is None:
        return
    documents = works[0].documents
    held_out = int(works[0].reading.held_out(0, documents).sum())
    if 0 < held_out < documents:
        return
    raise UserError(
        f"the {'train' if held_out else 'validation'} split is empty: with "
        f"data.validation.fraction = {fraction}, {held_out} of {documents} documents are held out",
        "make more documents of the text with data.document=paragraph or line, or set "
        "data.validation.fraction nearer to one half",
    )


def _refuse_blank_split(manifest: Manifest) -> None:
    """Find that every document of a split was blank."""
    for split in shards.SPLITS:
        if not manifest.tokens(split):
            raise UserError(
                f"the {split} split is empty: all of its {manifest.blank(split)} documents are "
                f"blank",
                "give text with words in it, or choose another data.text_field",
            )


def _least_bytes(works: list[Work]) -> int:
    spans = (span for work in works for block in work.blocks for span in block.spans)
    text_bytes = sum(span.stop - span.start for span in spans)
    return 2 * text_bytes // TEXT_BYTES_PER_TOKEN + 8 * sum(work.documents for work in works)


def _refuse_small_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    present = sum(path.stat().st_size for path in folder.glob("*/*.ds*"))
    if needed - present > free:
        raise UserError(
            f"too little room for the tokens in {folder}: {free:,} bytes free, "
            f"at least {needed - present:,} needed",
            "make room, or set folders.prepared to another file system",
        )


def _identity(run: Run, readings: list[Reading]) -> dict[str, Any]:
    return {
        "format_version": shards.FORMAT_VERSION,
        "settings_digest": run_dir.prepared_digest(run),
        "input_fingerprints": {
            "+".join(reading.splits): reading.text.fingerprint for reading in readings
        },
        "tokenizer_fingerprint": vocabulary.fingerprint(run),
    }


def _is_fresh(folder: Path, identity: dict[str, Any]) -> bool:
    return _is_planned(folder, identity) and _is_whole(folder)


def _is_whole(folder: Path) -> bool:
    try:
        manifest = shards.read_manifest(folder)
        shards.refuse_wrong_tokenizer(folder, manifest)
        shards.refuse_wrong_sizes(folder, manifest)
    except UserError:
        return False
    return True


def _is_planned(folder: Path, identity: dict[str, Any]) -> bool:
    plan = shards.read_plan(folder)
    if plan is None or plan.model_dump(include=set(identity)) != identity:
        return False
    try:
        shards.refuse_wrong_tokenizer(folder, plan)
    except UserError:
        return False
    return True


def _begin(folder: Path, run: Run, works: list[Work], log: Log) -> Plan:
    """Take up an interrupted plan, or clear the folder, make the tokenizer and write a new one."""
    identity = _identity(run, [work.reading for work in works])
    plan = shards.read_plan(folder)
    if plan is not None and _is_planned(folder, identity):
        return plan
    shards.clear(folder)
    made = _make_tokenizer(folder, run, works, log)
    plan = Plan(
        **identity,
        tokenizer_sha256=made.sha256,
        vocabulary_tokens=made.tokens,
        end_id=made.end_id,
        pad_id=made.pad_id,
        dtype=made.dtype,
    )
    shards.write_plan(folder, plan)
    return plan


def _make_tokenizer(folder: Path, run: Run, works: list[Work], log: Log) -> Vocabulary:
    name = vocabulary.origin(run)
    log(f"loading the tokenizer of {name} …" if name else "making the tokenizer …")
    began = time.monotonic()
    made_in = folder / ".tokenizer.partial"
    # In a process of its own: neither its threads nor torch stay in this one.
    texts = [encode.Text(work.reading, work.blocks) for work in works]
    start = partial(encode.tokenizer_maker, run, texts, made_in)
    with closing(ordered_map(start, [None], 1, threads=run.data.workers or cores())) as results:
        made = next(results)
    shards.sync_all(made_in)
    made_in.replace(shards.tokenizer_folder(folder))
    run_dir.sync_folder(folder)
    log(f"tokenizer: {made.tokens:,} tokens, {time.monotonic() - began:.1f} s")
    return made


def _write_shards(folder: Path, run: Run, plan: Plan, works: list[Work], log: Log) -> None:
    """Encode the blocks of every shard that is not whole yet."""
    jobs = [Job(n, block) for n, work in enumerate(works) for block in _missing(folder, plan, work)]
    if not jobs:
        return
    start = partial(
        encode.encoder,
        shards.tokenizer_folder(folder) / "tokenizer.json",
        plan.end_id,
        plan.dtype,
        run.data,
        [work.reading for work in works],
    )
    workers = min(run.data.workers or cores(), len(jobs))
    with closing(ordered_map(start, jobs, workers)) as results:
        counted = _counted(results, jobs, plan, log)
        for (n, number), group in groupby(zip(jobs, counted, strict=True), key=_shard_of):
            splits = works[n].reading.splits
            _write_shard(folder, plan, splits, number, (encoded for _, encoded in group))


def _shard_of(pair: tuple[Job, Any]) -> tuple[int, int]:
    return pair[0].reading, pair[0].block.shard


def _missing(folder: Path, plan: Plan, work: Work) -> list[Block]:
    whole = {
        number
        for number in range(work.shard_count)
        if all(
            shards.finished_shard(folder, split, number, plan.dtype)
            for split in work.reading.splits
        )
    }
    return [block for block in work.blocks if block.shard not in whole]


def _write_shard(
    folder: Path,
    plan: Plan,
    splits: tuple[Split, ...],
    number: int,
    encoded: Iterable[dict[Split, Encoded]],
) -> None:
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(folder, split, number, plan.dtype))
            for split in splits
        }
        for found in encoded:
            for split, documents in found.items():
                writers[split].add(
                    documents.tokens, documents.lengths, documents.blank, documents.labels
                )
        for writer in writers.values():
            writer.finish()


def _counted(
    results: Iterable[dict[Split, Encoded]], jobs: list[Job], plan: Plan, log: Log
) -> Iterator[dict[Split, Encoded]]:
    """Pass results on, with a line of progress every few seconds and at the end."""
    documents_in_all = sum(job.block.documents for job in jobs)
    bytes_per_token = 2 if plan.dtype == "uint16" else 4
    began = told = time.monotonic()
    documents = tokens = 0
    for job, encoded in zip(jobs, results, strict=True):
        yield encoded
        documents += job.block.documents
        tokens += sum(len(found.tokens) for found in encoded.values()) // bytes_per_token
        now = time.monotonic()
        if now - told >= SECONDS_BETWEEN_LINES or documents == documents_in_all:
            told = now
            log(
                f"tokenised {documents:,} of {documents_in_all:,} documents, "
                f"{tokens / 1e6:.2f} Mtok, {tokens / 1e6 / (now - began):.2f} Mtok/s"
            )


def _manifest(folder: Path, plan: Plan, works: list[Work]) -> Manifest:
    found: dict[Split, list[shards.Shard]] = {}
    for work in works:
        for split in work.reading.splits:
            numbers = range(work.shard_count)
            whole = [shards.finished_shard(folder, split, n, plan.dtype) for n in numbers]
            found[split] = [shard for shard in whole if shard is not None]
            assert len(found[split]) == work.shard_count, f"a shard of {split} went missing"
    return Manifest(**plan.model_dump(), train=found["train"], validation=found["validation"])


@contextmanager
def _locked(folder: Path, log: Log) -> Iterator[None]:
    """Let one process at a time write into a folder, where the file system has locks."""
    with (folder / ".lock").open("ab") as file:
        try:
            _lock(file.fileno(), folder, log)
            shards.remove_partial_files(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                raise
            log(f"{folder} is on a file system without locks: prepare data in one place at a time")
        yield


def _lock(descriptor: int, folder: Path, log: Log) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log(f"another process prepares {folder}: waiting for it …")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
