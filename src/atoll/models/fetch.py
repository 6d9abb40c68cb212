"""`atoll fetch BUNDLE`: the half of `atoll prepare` that reads models and makes tokens."""

import json
import shutil
from pathlib import Path

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.data.harness_tasks import fetch_tasks
from atoll.data.tokenize import prepare
from atoll.errors import UserError
from atoll.models.convert import convert_llama, convert_pickles, is_meta_llama
from atoll.models.source import EVERY_FILE, snapshot
from atoll.settings import Run, load_run


def main(argv: list[str]) -> int:
    """Fetch, convert, tokenise, then vouch for every file; what is there already stays."""
    parser = CommandParser("fetch", main.__doc__)
    parser.add_argument("bundle", type=Path)
    folder = parser.read(argv).bundle
    run = load_run(run_dir.bundle_request(folder))
    if run.model.source is not None:
        fetch_model(run, folder / "model")
    prepare(_with_tokens_in(run, folder), print)
    if run.evaluation.tasks:
        fetch_tasks(run.evaluation, run_dir.tasks_folder(folder))
    write_manifest(run, folder)
    return 0


def fetch_model(run: Run, into: Path) -> None:
    """The model's folder with safetensors, from a folder, the hub, or Meta's own weights."""
    done = into.with_name(".model.done")
    if done.is_file() and into.is_dir():
        return
    source = run.model.source
    assert source is not None
    if is_meta_llama(Path(source)):
        convert_llama(Path(source), into)
    elif Path(source).is_dir():
        shutil.copytree(source, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    else:
        snapshot(source, run.model.revision, into, EVERY_FILE)
    convert_pickles(into)
    if not (into / "config.json").is_file():
        raise UserError(f"no config.json in {source}", "name a Hugging Face model")
    run_dir.write_whole(done, "")


def write_manifest(run: Run, folder: Path) -> None:
    """The sha256 of every file, last."""
    paths = sorted(
        path
        for part in ("model", "tokens", "tasks")
        for path in (folder / part).rglob("*")
        if path.is_file()
        and not any(name.startswith(".") for name in path.relative_to(folder).parts)
    )
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": run_dir.sha256_of(path),
        }
        for path in paths
    }
    source = {"model.source": run.model.source, "model.revision": run.model.revision}
    made_for = source | {"data": run_dir.prepared_digest(run)}
    manifest = {"made_for": made_for, "tasks": run.evaluation.tasks, "files": files}
    run_dir.write_whole(run_dir.bundle_manifest(folder), json.dumps(manifest, indent=1))


def _with_tokens_in(run: Run, folder: Path) -> Run:
    """The run that tokenises into the bundle, with the tokenizer of the bundle's model."""
    model = run.model
    if model.source is not None:
        model = model.model_copy(update={"source": str(folder / "model"), "revision": None})
    folders = run.folders.model_copy(update={"bundle": folder})
    return run.model_copy(update={"model": model, "folders": folders})
