"""`atoll prepare`: everything a run reads, fetched and tokenised into one folder that travels."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster import striping
from atoll.cluster.modules import atoll_outside_jobs
from atoll.config.bundle import read_manifest
from atoll.config.compose import compose, overrides_parser
from atoll.errors import UserError
from atoll.images.check import check_image
from atoll.settings import Run, load_run

ABOUT = """\
Where there is a network: fetch the model, its tokenizer and the data of a run, convert and tokenise
them into BUNDLE, and vouch for every file. Typed again it goes on where it stopped.
At the facility: sbatch/train.sbatch KEY=VALUE … folders.bundle=BUNDLE"""


def main(argv: list[str]) -> int:
    """Make a bundle, or compare one with what it says of itself."""
    parser = overrides_parser("prepare", ABOUT)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--into", metavar="BUNDLE", type=Path, help="the folder to make")
    read = "read every file of a bundle again and compare its sha256"
    what.add_argument("--verify", metavar="BUNDLE", type=Path, help=read)
    arguments = parser.read(argv)
    if arguments.verify:
        return verify(arguments.verify.absolute())
    folder, overrides = arguments.into.absolute(), arguments.overrides
    composition = compose(overrides)
    run = composition.run
    check_image(run)
    atoll = atoll_outside_jobs(_seeing(run, folder))
    _refuse_another_request(folder, run)
    run_dir.write_whole(run_dir.bundle_request(folder), composition.as_yaml())
    if code := subprocess.run([*atoll, "fetch", str(folder)]).returncode:
        return code
    words = [word for word in overrides if not word.startswith("folders.")]
    line = shlex.join(["sbatch/train.sbatch", *words, f"folders.bundle={folder}"])
    print(f"the bundle is whole: {folder}\n{_how_to_use(run, line)}")
    _advise(striping.before_copying(read_manifest(folder)["files"]))
    return 0


def _how_to_use(run: Run, line: str) -> str:
    """The line that trains on the bundle, and what to change in it where it is copied to."""
    copied = "folders.bundle=FOLDER there"
    if run.facility.scheduler != "none":
        return f"at the facility: {line}\nwhere it is copied: {copied}"
    return f"here: {line}\nat a facility: copy it, then facility=NAME and {copied}"


def _seeing(run: Run, bundle: Path) -> Run:
    """The run whose container sees the bundle, and no folder that only a job would make."""
    update = dict.fromkeys(("runs", "prepared"), bundle)
    return run.model_copy(update={"folders": run.folders.model_copy(update=update)})


def verify(folder: Path) -> int:
    """Compare the sha256 of every file of a bundle; `UserError` names the first that differs."""
    files = read_manifest(folder)["files"]
    for name, facts in files.items():
        path = folder / name
        found = run_dir.sha256_of(path) if path.is_file() else "missing"
        if found != facts["sha256"]:
            raise UserError(
                f"{path} is {found[:12]}, bundle.json says {facts['sha256'][:12]}",
                "copy it again, or delete it and type atoll prepare --into again",
            )
    print(f"{len(files)} files match their sha256")
    _advise(striping.after_copying(folder, files))
    return 0


def _asked(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude={"folders", "image", "facility"})


def _advise(advice: str) -> None:
    if advice:
        print(advice)


def _refuse_another_request(folder: Path, run: Run) -> None:
    """One bundle is of one run: another's files would be mixed into it.

    Where it is made, and in which image, may be another: caches appear, an image is built anew.
    """
    path = run_dir.bundle_request(folder)
    if folder.exists() and any(folder.iterdir()) and not path.is_file():
        raise UserError(f"{folder} holds other things", "give a new folder: --into BUNDLE")
    if path.is_file() and _asked(load_run(path)) != _asked(run):
        raise UserError(
            f"{folder} was begun with other settings (see {path})",
            "give another folder, or delete this one",
        )
