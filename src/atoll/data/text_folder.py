"""One text becomes a folder of token shards, once for all runs that share it.

The caller cuts the input into blocks and writes shards; processes read and encode the blocks.
Every byte depends on the settings and the text alone: not on the number of processes, nor on
how often the work was interrupted.
"""

import errno
import fcntl
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.data import encode, encode_chat, refusals, shard_writer, shards, vocabulary
from atoll.data.encode import CorpusBlocks, SplitCorpus, Text, WorkItem
from atoll.data.shard_writer import ShardWriter, TokenBlock
from atoll.data.shards import Split, TokenManifest, TokenPlan, TokenShard
from atoll.data.sources import blocks, corpus
from atoll.data.sources.blocks import Block
from atoll.data.vocabulary import Vocabulary
from atoll.data.workers import cores, ordered_map, start_server
from atoll.errors import UserError
from atoll.settings import Run

Log = Callable[[str], None]
Steps = Generator[int, None, None]
SECONDS_BETWEEN_LINES = 5.0


def preparing(run: Run, folder: Path, log: Log) -> Steps:
    """Tokenise the one text of a run into a folder, unless that is done already.

    Yields 0 once the plan of its shards is written, then how many shards to train on are whole,
    with each that is. What an interrupted call left whole is kept. Raises `UserError` for missing
    or empty data, an unusable tokenizer, an empty split, or a full disk.
    """
    try:
        sources = split_corpora(run)
    except UserError as error:
        # Tokens made where there was a network, or from text that has since been put away.
        if not _is_whole(folder):
            raise
        log(f"tokens are ready: {folder}; their text is out of reach: {error.found}")
        return
    identity = _identity(run, sources)
    if _is_ready(folder, identity, log):  # nothing is written: the folder may be a colleague's
        return
    before = identity | {"input_fingerprints": _older_fingerprints(sources)}
    if run_dir.complete_checkpoints(run_dir.folder(run)) and _is_ready(folder, before, log):
        return  # a run that has steps goes on with the tokens that it began with
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, log):
        if _is_ready(folder, identity, log):
            return
        plan = _interrupted_plan(folder, identity)
        refusals.refuse_other_text(run, identity["input_fingerprints"])
        start_server()
        _say_layouts(sources, log)
        corpora = in_blocks(run, sources)
        refusals.refuse_empty_split(run, corpora)
        needed = refusals.least_bytes(corpora)
        refusals.refuse_small_disk(folder, needed)
        with shard_writer.naming_a_full_disk(folder, needed):
            plan = _with_counts(
                folder, plan or _new_plan(folder, run, identity, corpora, log), corpora
            )
            yield 0
            yield from _write_shards(folder, run, plan, corpora, log)
            manifest = _manifest(folder, plan, corpora)
            refusals.refuse_too_long(manifest, run)
            refusals.refuse_blank_split(manifest)
            manifest.write(shards.manifest_file(folder))
    _say_lengths(manifest, run, log)
    log(
        f"tokens are ready: {folder}: {manifest.tokens('train'):,} to train on, "
        f"{manifest.tokens('validation'):,} held out; vocabulary {manifest.vocabulary_tokens:,}"
    )


def open_text(
    folder: Path, *, verify: bool = False, rank: int = 0, world_size: int = 1
) -> TokenManifest:
    """The manifest of one text's tokens, after a check that every shard is there at its full size.

    With `verify` this rank also compares the sha256 of its part of the shards. Raises
    `UserError` naming the shard that is missing, cut short or corrupted.
    """
    manifest = shards.read_manifest(folder)
    shards.refuse_wrong_tokenizer(folder, manifest)
    shards.refuse_wrong_sizes(folder, manifest)
    if verify:
        shards.refuse_wrong_content(folder, manifest, rank, world_size)
    return manifest


def split_corpora(run: Run) -> list[SplitCorpus]:
    """The text of a run of one source, and the one it holds out where that has files of its own."""
    train = corpus.train_corpus(run.data)
    validation = corpus.validation_corpus(run.data)
    if validation is None:
        fraction = run.data.validation.fraction or 0.0
        return [SplitCorpus(train, ("train", "validation"), fraction, run.seed)]
    corpus.refuse_overlap(train, validation)
    splits: tuple[Split, Split] = ("train", "validation")
    texts = zip((train, validation), splits, strict=True)
    return [SplitCorpus(text, (split,), 0.0, 0) for text, split in texts]


def _say_layouts(sources: list[SplitCorpus], log: Log) -> None:
    layouts = Counter(part.layout for source in sources for part in source.corpus.parts)
    for layout, parts in sorted(layouts.items()):
        if layout:
            log(f"conversations as {layout}: {parts} file{'s' * (parts > 1)}")


def _say_lengths(manifest: TokenManifest, run: Run, log: Log) -> None:
    cut, dropped = (
        sum(count(split) for split in shards.SPLITS) for count in (manifest.cut, manifest.dropped)
    )
    if cut or dropped:
        kept = sum(manifest.documents(split) for split in shards.SPLITS)
        what = "conversations"
        if run.data.format == "preference":
            kept, what = kept // 2, "pairs"
        log(
            f"of {kept + dropped:,} {what} {cut:,} are cut at a turn and {dropped:,} left "
            f"out: they have more than {run.data.sequence_tokens:,} tokens (data.sequence_tokens)"
        )


def in_blocks(run: Run, sources: list[SplitCorpus]) -> list[CorpusBlocks]:
    """Texts cut into blocks.

    Raises `UserError` where one is empty.
    """
    return [_cut(run, source) for source in sources]


def _cut(run: Run, source: SplitCorpus) -> CorpusBlocks:
    text = CorpusBlocks(source, list(blocks.blocks(source.corpus, run.data.documents_per_shard)))
    if not text.blocks:
        raise UserError(
            f"no documents for {' and '.join(source.splits)}: the text is empty",
            "give data.files or data.hub that hold text",
        )
    return text


def input_fingerprints(sources: list[SplitCorpus]) -> dict[str, str]:
    """Of each text, by the splits that it is of."""
    return {"+".join(source.splits): source.corpus.fingerprint for source in sources}


def _older_fingerprints(sources: list[SplitCorpus]) -> dict[str, str]:
    texts = {"+".join(source.splits): source.corpus for source in sources}
    return {name: text.older_fingerprint or text.fingerprint for name, text in texts.items()}


def _identity(run: Run, sources: list[SplitCorpus]) -> dict[str, Any]:
    return {
        "format_version": shards.FORMAT_VERSION,
        "settings_digest": run_dir.prepared_digest(run),
        "input_fingerprints": input_fingerprints(sources),
        "tokenizer_fingerprint": vocabulary.fingerprint(run),
    }


def _is_ready(folder: Path, identity: dict[str, Any], log: Log) -> bool:
    is_ready = _interrupted_plan(folder, identity) is not None and _is_whole(folder)
    if is_ready:
        log(f"tokens are ready: {folder}")
    return is_ready


def _is_whole(folder: Path) -> bool:
    try:
        open_text(folder)
    except UserError:
        return False
    return True


def _interrupted_plan(folder: Path, identity: dict[str, Any]) -> TokenPlan | None:
    """The plan to go on with, where it is of the same text and settings and has its tokenizer."""
    plan = shards.read_plan(folder)
    if plan is None or plan.model_dump(include=set(identity)) != identity:
        return None
    try:
        shards.refuse_wrong_tokenizer(folder, plan)
    except UserError:
        return None
    return plan


def _new_plan(
    folder: Path, run: Run, identity: dict[str, Any], corpora: list[CorpusBlocks], log: Log
) -> TokenPlan:
    """Clear the folder, make the tokenizer, and plan its tokens."""
    shard_writer.clear(folder)
    made = save_tokenizer(folder, run, [(run.data, corpora)], log)
    return TokenPlan(
        **identity,
        tokenizer_sha256=made.sha256,
        vocabulary_tokens=made.tokens,
        begin_id=made.begin_id,
        end_id=made.end_id,
        pad_id=made.pad_id,
        dtype=made.dtype,
    )


def _with_counts(folder: Path, plan: TokenPlan, corpora: list[CorpusBlocks]) -> TokenPlan:
    """The plan with the number of shards, which whoever reads it before they are whole needs."""
    counts = {split: text.shard_count for text in corpora for split in text.source.splits}
    if plan.shard_counts != counts:
        plan = plan.model_copy(update={"shard_counts": counts})
        plan.write(shards.plan_file(folder))
    return plan


def save_tokenizer(folder: Path, run: Run, texts: list[Text], log: Log) -> Vocabulary:
    """Load the tokenizer of a run, or make it of these texts, into a prepared folder."""
    name = vocabulary.origin(run)
    log(f"loading the tokenizer of {name} …" if name else "making the tokenizer …")
    began = time.monotonic()
    made_in = folder / ".tokenizer.partial"
    # In a process of its own: neither its threads nor torch stay in this one.
    start = partial(encode.tokenizer_maker, run, texts, made_in)
    with closing(ordered_map(start, [None], 1, threads=run.data.workers or cores())) as results:
        made = next(results)
    shard_writer.sync_all(made_in)
    made_in.replace(shards.tokenizer_folder(folder))
    run_dir.sync_folder(folder)
    log(f"tokenizer: {made.tokens:,} tokens, {time.monotonic() - began:.1f} s")
    return made


def _write_shards(
    folder: Path, run: Run, plan: TokenPlan, corpora: list[CorpusBlocks], log: Log
) -> Steps:
    """Encode the blocks of every shard that is not whole yet."""
    items = [
        WorkItem(number, block)
        # held-out files first: a run may begin with them and the first shards
        for number, text in reversed(list(enumerate(corpora)))
        for block in _missing(folder, plan, text)
    ]
    if not items:
        return
    sources = [text.source for text in corpora]
    tokenizer = shards.tokenizer_folder(folder)
    if run.data.holds_conversations:
        start = partial(encode_chat.encoder, tokenizer, plan.dtype, run.data, sources)
    else:
        around = (plan.begin_id, plan.end_id)
        file = tokenizer / "tokenizer.json"
        start = partial(encode.encoder, file, around, plan.dtype, run.data, sources)
    workers = min(run.data.workers or cores(), len(items))
    with closing(ordered_map(start, items, workers)) as results:
        in_all = sum(text.documents for text in corpora)
        counted = _counted(results, items, in_all, plan, log)
        for (number, shard), group in groupby(zip(items, counted, strict=True), key=_shard_of):
            splits = corpora[number].source.splits
            _write_shard(folder, plan, splits, shard, (encoded for _, encoded in group))
            yield shard + 1 if "train" in splits else 0


def _shard_of(pair: tuple[WorkItem, Any]) -> tuple[int, int]:
    return pair[0].corpus, pair[0].block.shard


def _finished(folder: Path, plan: TokenPlan, text: CorpusBlocks, split: Split) -> list[TokenShard]:
    numbers = range(text.shard_count)
    finished = (shards.finished_shard(folder, split, number, plan.dtype) for number in numbers)
    return [shard for shard in finished if shard is not None]


def _missing(folder: Path, plan: TokenPlan, text: CorpusBlocks) -> list[Block]:
    numbers = [
        {shard.number for shard in _finished(folder, plan, text, split)}
        for split in text.source.splits
    ]
    finished = set.intersection(*numbers)
    return [block for block in text.blocks if block.shard not in finished]


def _write_shard(
    folder: Path,
    plan: TokenPlan,
    splits: tuple[Split, ...],
    number: int,
    encoded: Iterable[dict[Split, TokenBlock]],
) -> None:
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(folder, split, number, plan.dtype))
            for split in splits
        }
        for token_blocks in encoded:
            for split, block in token_blocks.items():
                writers[split].add(block)
        for writer in writers.values():
            refusals.refuse_other_media(folder, plan, writer.largest)
            writer.finish()


def _counted(
    results: Iterable[dict[Split, TokenBlock]],
    items: list[WorkItem],
    documents_in_all: int,
    plan: TokenPlan,
    log: Log,
) -> Iterator[dict[Split, TokenBlock]]:
    """Pass results on, with a line of progress every few seconds and at the end."""
    wanted = sum(item.block.documents for item in items)
    bytes_per_token = 2 if plan.dtype == "uint16" else 4
    began = last_line = time.monotonic()
    documents = tokens = 0
    for item, encoded in zip(items, results, strict=True):
        yield encoded
        documents += item.block.documents
        tokens += sum(len(block.tokens) for block in encoded.values()) // bytes_per_token
        now = time.monotonic()
        if now - last_line >= SECONDS_BETWEEN_LINES or documents == wanted:
            last_line = now
            log(_progress(documents, wanted, documents_in_all, tokens, now - began))


def _progress(
    documents: int, wanted: int, documents_in_all: int, tokens: int, seconds: float
) -> str:
    """wanted: of this call; what an earlier one left whole is in `documents_in_all` alone."""
    done = documents_in_all - wanted + documents
    left_seconds = round(seconds * (wanted - documents) / documents)
    time_left = f", {timedelta(seconds=left_seconds)} left" if documents < wanted else ""
    return (
        f"tokenised {done:,} of {documents_in_all:,} documents, {tokens / 1e6:.2f} Mtok, "
        f"{tokens / 1e6 / seconds:.2f} Mtok/s{time_left}"
    )


def _manifest(folder: Path, plan: TokenPlan, corpora: list[CorpusBlocks]) -> TokenManifest:
    by_split: dict[Split, list[TokenShard]] = {}
    for text in corpora:
        for split in text.source.splits:
            by_split[split] = _finished(folder, plan, text, split)
            assert len(by_split[split]) == text.shard_count, f"a shard of {split} went missing"
    return TokenManifest(
        **plan.model_dump(), train=by_split["train"], validation=by_split["validation"]
    )


@contextmanager
def locked(folder: Path, log: Log) -> Iterator[None]:
    """Let one process at a time write into a folder, where the file system has locks."""
    with (folder / ".lock").open("ab") as file:
        try:
            _lock(file.fileno(), folder, log)
            folder.mkdir(parents=True, exist_ok=True)  # whoever had it may have left nothing
            shard_writer.remove_partial_files(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                raise
            log(f"{folder} is on a file system without locks: prepare data in one place at a time")
        try:
            yield
        except UserError:
            if [path.name for path in folder.iterdir()] == [".lock"]:  # nothing came of it
                shutil.rmtree(folder)
            raise


def _lock(descriptor: int, folder: Path, log: Log) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log(f"another process prepares {folder}: waiting for it …")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
