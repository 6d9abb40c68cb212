"""The folder of several sources: which they are, and the tokenizer that all of them share.

FOLDER/
  manifest.json            written last: of each source the sha256 of its own manifest
  plan.json                what the tokenizer was made from
  tokenizer/               as Hugging Face saves it
The tokens of a source lie in a folder of its own, as if a run had it alone.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from atoll import run_dir
from atoll.data import shard_writer, shards, vocabulary
from atoll.data.refusals import refuse_other_text
from atoll.data.shards import FORMAT_VERSION, Record
from atoll.data.sources.parts import naming
from atoll.data.text_folder import (
    Log,
    Steps,
    in_blocks,
    input_fingerprints,
    locked,
    preparing,
    save_tokenizer,
    split_corpora,
)
from atoll.errors import UserError
from atoll.run_dir import sha256_of
from atoll.settings import Run

NEVER_READ = 1e-9  # stands for the weight of such a source


class MixturePlan(Record):
    """What the tokenizer is made from: its own settings, and the text of each source if any."""

    format_version: int = FORMAT_VERSION
    tokenizer_fingerprint: str
    input_fingerprints: dict[str, str]
    tokenizer_sha256: str = ""


class MixtureManifest(Record):
    """The sources of a mixture by name, and the sha256 of each one's manifest."""

    format_version: int
    tokenizer_sha256: str
    sources: dict[str, str]


def prepare_mixture(run: Run, folder: Path, log: Log, planned: Callable[[], None]) -> None:
    """Make the shared tokenizer, then the tokens of every source; what is whole is kept.

    planned: with data.window_shards called once the plans of all sources are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, log):
        tokenizer_sha256 = _shared_tokenizer(run, folder, log)
        digests = {}
        in_windows = run.data.window_shards is not None
        begin = partial(_in_turns, planned=planned) if in_windows else _one_by_one
        begin(run, log)
        for name, own in _folders(run).items():
            if shards.read_manifest(own).tokenizer_sha256 != tokenizer_sha256:
                raise UserError(
                    f"source {name}: its tokens in {own} are of another tokenizer than {folder}",
                    f"delete {folder}, then run `atoll tokenize RUN_FOLDER`",
                )
            digests[name] = sha256_of(shards.manifest_file(own))
        manifest = MixtureManifest(
            format_version=FORMAT_VERSION, tokenizer_sha256=tokenizer_sha256, sources=digests
        )
        manifest.write(shards.manifest_file(folder))


def open_mixture(run: Run, folder: Path) -> MixtureManifest:
    """What a mixture's folder says of its sources.

    Raises `UserError` where it is missing, or a source has been made again since.
    """
    hint = "run `atoll tokenize RUN_FOLDER`"
    try:
        text = shards.manifest_file(folder).read_bytes()
        manifest = MixtureManifest.model_validate_json(text)
    except FileNotFoundError:
        raise UserError(f"no tokens at {folder}: manifest.json is missing", hint) from None
    except ValidationError as error:
        raise UserError(
            f"{shards.manifest_file(folder)} is damaged: {error.errors()[0]['msg']}", hint
        ) from None
    for data, own in zip(run.data.each, run_dir.prepared_sources(run), strict=True):
        path = shards.manifest_file(own)
        if not path.is_file() or sha256_of(path) != manifest.sources.get(data.name):
            state = "is no more as it was" if path.is_file() else "is missing"
            raise UserError(f"source {data.name}: {path} {state}", hint)
    return manifest


def _folders(run: Run) -> dict[str, Path]:
    """The folder of each source."""
    names = [source.name for source in run.data.sources]
    return dict(zip(names, run_dir.prepared_sources(run), strict=True))


def _begun(run: Run, log: Log) -> dict[str, Steps]:
    """The preparation of each source, to be taken step by step."""
    runs = zip(run_dir.source_runs(run), _folders(run).items(), strict=True)
    return {
        name: preparing(source, folder, partial(_log_of, name, log))
        for source, (name, folder) in runs
    }


def _one_by_one(run: Run, log: Log) -> None:
    for name, steps in _begun(run, log).items():
        with naming(name):
            deque(steps, maxlen=0)


def _in_turns(run: Run, log: Log, planned: Callable[[], None]) -> None:
    """Prepare a window of each source, then of whichever training will need next.

    All folders are locked until the end, one after another in the same order in every process.
    """
    folders, begun = _folders(run), _begun(run, log)
    with ExitStack() as stack:
        for name in sorted(begun, key=folders.__getitem__):
            stack.enter_context(closing(begun[name]))
            with naming(name):
                next(begun[name], 0)
        planned()
        windows = dict.fromkeys(begun, 0)
        heaviest = {s.name: max(s.weights.values()) or NEVER_READ for s in run.data.sources}
        while begun:
            name = min(begun, key=lambda name: (windows[name] > 0, windows[name] / heaviest[name]))
            windows[name] += 1
            behind = windows[name] * (run.data.window_shards or 1)
            with naming(name):
                if not any(whole >= behind for whole in begun[name]):
                    del begun[name]


def _log_of(source: str, log: Log, line: str) -> None:
    log(f"{source}: {line}")


def _shared_tokenizer(run: Run, folder: Path, log: Log) -> str:
    """The sha256 of the tokenizer in the folder, made where it is not there as it should be."""
    plan = _plan(run, folder)
    path = shards.tokenizer_folder(folder) / "tokenizer.json"
    before = _written_plan(folder)
    if before is not None and path.is_file() and sha256_of(path) == before.tokenizer_sha256:
        same = plan is None or plan == before.model_copy(update={"tokenizer_sha256": ""})
        if same:
            return before.tokenizer_sha256
    assert plan is not None, "a text out of reach goes with a tokenizer that is there"
    texts = []
    for source in run_dir.source_runs(run) if vocabulary.origin(run) is None else []:
        with naming(source.data.name):
            corpora = split_corpora(source)
            refuse_other_text(source, input_fingerprints(corpora))  # before anything is cleared
            texts.append((source.data, in_blocks(source, corpora)))
    shard_writer.clear(folder)
    made = save_tokenizer(folder, run, texts, log)
    done = plan.model_copy(update={"tokenizer_sha256": made.sha256})
    done.write(shards.plan_file(folder))
    return made.sha256


def _plan(run: Run, folder: Path) -> MixturePlan | None:
    """What the tokenizer is to be made from; nothing where text is out of reach that made it."""
    fingerprints = {}
    for source in run_dir.source_runs(run) if vocabulary.origin(run) is None else []:
        try:
            with naming(source.data.name):
                texts = split_corpora(source)
        except UserError:
            if _written_plan(folder) is None:
                raise
            return None
        fingerprints[source.data.name] = texts[0].corpus.fingerprint
    return MixturePlan(
        tokenizer_fingerprint=vocabulary.fingerprint(run), input_fingerprints=fingerprints
    )


def _written_plan(folder: Path) -> MixturePlan | None:
    try:
        return MixturePlan.model_validate_json(shards.plan_file(folder).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
