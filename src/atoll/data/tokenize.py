"""`atoll tokenize RUN_FOLDER`: text becomes token shards, once for all runs that share it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.data import encode, vocabulary, waits
from atoll.data.mixture_folder import open_mixture, prepare_mixture
from atoll.data.shards import TokenManifest
from atoll.data.text_folder import Log, in_blocks, open_text, preparing, split_corpora
from atoll.data.text_report import text_report
from atoll.settings import Run, load_run


def main(argv: list[str]) -> int:
    """Prepare the data of a run."""
    parser = CommandParser("tokenize", __doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--verify", action="store_true", help="compare every shard's sha256")
    told = "write text-report.md: lengths, duplicates and languages of each source"
    parser.add_argument("--report", action="store_true", help=told)
    arguments = parser.read(argv)
    run = load_run(run_dir.settings_file(arguments.run_folder))
    begin = partial(_let_ranks_begin, arguments.run_folder)
    prepare(run, lambda line: print(line, flush=True), begin)
    if arguments.verify:
        open_prepared(run, verify=True)
        print("every shard matches its sha256", flush=True)
    if arguments.report:
        page = text_report(run)
        run_dir.write_whole(run_dir.text_report_file(arguments.run_folder), page)
        print(page, end="", flush=True)
    return 0


def _let_ranks_begin(run_folder: Path) -> None:
    """Tell ranks that job.sh starts beside this: the plan they find is the one of their run."""
    if waits.preparation_state(run_folder) == waits.STARTING:
        run_dir.write_whole(run_dir.preparing_file(run_folder), waits.RUNNING + "\n")


def prepare(run: Run, log: Log, planned: Callable[[], None] = lambda: None) -> Path:
    """Tokenise the data of a run, unless that is done already, and give the folder.

    planned: called once all plans are written, before the first shard; of several sources with
    data.window_shards alone.
    What an interrupted call left whole is kept. Raises `UserError` for missing or empty data,
    an unusable tokenizer, an empty split, or a full disk.
    """
    folder = run_dir.prepared(run)
    if run.folders.bundle is not None and run_dir.bundle_manifest(run.folders.bundle).is_file():
        log(f"tokens are ready: {folder}")  # as they were when the bundle was made
    elif run.data.sources:
        prepare_mixture(run, folder, log, planned)
    else:
        for shards_whole in preparing(run, folder, log):
            if shards_whole == 0:
                planned()
    return folder


def make_tokenizer(run: Run, folder: Path) -> None:
    """Save the tokenizer of a run, and make no tokens; text is read where it is made of it."""
    texts = (
        []
        if vocabulary.origin(run)
        else [
            (source.data, in_blocks(source, split_corpora(source)))
            for source in run_dir.source_runs(run)
        ]
    )
    encode.tokenizer_maker(run, texts, folder)(None)


def open_prepared(
    run: Run, *, verify: bool = False, rank: int = 0, world_size: int = 1
) -> TokenManifest:
    """The manifest of a run's tokens, after a check that every shard is there at its full size.

    Of several sources that of the first: their tokenizer is the same. With `verify` this rank
    also compares the sha256 of its part of the shards. Raises `UserError` naming the shard that
    is missing, cut short or corrupted.
    """
    folder = run_dir.prepared(run)
    folders = run_dir.prepared_sources(run)
    if run.data.sources:
        open_mixture(run, folder)
    manifests = [
        open_text(source, verify=verify, rank=rank, world_size=world_size) for source in folders
    ]
    return manifests[0]
