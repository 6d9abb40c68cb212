"""What `sbatch/atoll`, on a machine with an image alone, is told by the Atoll inside that image.

Both are files of words that end with a NUL: nothing is read from what a person is shown.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from atoll import run_dir
from atoll.config.binds import own_folders
from atoll.config.compose import combinations, compose, config_tree
from atoll.config.stated_folders import stated_folder
from atoll.errors import UserError
from atoll.settings import Run, load_run

OF_RUNS = "--runs"  # the folders of runs and images alone, for a command that takes no settings
OF = "--of"  # the folders of runs that are there


def hand_over(run: Run, file: Path, folder: Path, follows: Path | None = None) -> None:
    """Leave the path of a run's launch.sh in `file`: the run takes place outside the image.

    follows: the script of what comes behind it.

    Raises `UserError` where the run would need an environment of the clone.
    """
    if run.image.file is None:
        raise UserError(
            f"no environment for image={run.image.name}: this clone has an image and no .venv",
            "choose an image, as image=cpu, or make setup",
        )
    if run.launcher.name == "ssh":
        raise UserError(
            "launcher=ssh starts from a .venv of this clone, and none is there", "make setup"
        )
    print(f"run {run.name} in {folder}", flush=True)
    with open(file, "a") as scripts:
        scripts.write(f"{run_dir.launch_script(folder)}\0")
        if follows is not None:
            scripts.write(f"{follows}\0")


def folders(overrides: Sequence[str]) -> list[str]:
    """Every folder that composing the runs of these words looks at or writes to."""
    runs = [compose(words).run for words in combinations(overrides, config_tree())]
    named = {path for run in runs for path in (*own_folders(run), run.folders.images)}
    named |= {run.image.file.parent for run in runs if run.image.file is not None}
    return sorted(map(str, named))


def asked(words: Sequence[str]) -> list[str]:
    """The folders of runs, of those that come behind `OF`, or of those that settings make."""
    if words == [OF_RUNS]:
        return [str(stated_folder(name).absolute()) for name in ("runs", "images")]
    if words[:1] == [OF]:
        runs = [load_run(run_dir.settings_file(Path(folder))) for folder in words[1:]]
        return sorted({str(path) for run in runs for path in own_folders(run)})
    return folders([word for word in words if not word.startswith("-") and "=" in word])


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    named = asked(words)
    Path(file).write_text("".join(f"{folder}\0" for folder in named))
