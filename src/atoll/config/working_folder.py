"""Where the configuration tree, batch file and recipes are; `atoll init` makes such a folder.

A clone has them beside `src`. A wheel carries them inside the package, and a working folder that
`atoll init` wrote has copies that its user may change and add to.
"""

import json
import os
import shlex
import shutil
import site
import sys
from importlib.util import find_spec
from pathlib import Path

from atoll import run_dir
from atoll.commands import CommandParser
from atoll.config.paths import clone_around
from atoll.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
CLONE = PACKAGE.parents[1]
CARRIED = PACKAGE / "working_folder"  # made when the wheel is built: see setup.py
PARTS = (".gitignore", "Makefile", "hydra_conf", "sbatch")
OWN = Path("hydra_conf", "local")  # never written over
WRITTEN = ".atoll-init.json"  # each file's sha256 as `atoll init` wrote it

ABOUT = """\
Write a working folder for an installed atoll: the configuration tree, your own settings
(hydra_conf/local/default.yaml), the batch file and a Makefile. A clone is one already."""


def main(argv: list[str]) -> int:
    """Write the folder, and say what comes next."""
    parser = CommandParser("init", ABOUT)
    again = "write this version's files over those of an older one, but for what you changed"
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--update", action="store_true", help=again)
    arguments = parser.read(argv)
    folder = Path(os.path.normpath(Path.cwd() / arguments.folder.expanduser()))
    for kept in write_working_folder(folder, arguments.update):
        print(f"{folder / kept}: kept as you changed it; this version's is {kept.name}.new")
    print(
        f"{folder}: your settings go to {OWN / 'default.yaml'}\n"
        f"next: cd {shlex.quote(str(folder))} && {_first_command()}\ndocs: {CARRIED / 'docs'}"
    )
    return 0


def _first_command() -> str:
    if find_spec("torch") is not None:
        return "make demo"
    return "sbatch/atoll list facilities"


def source_folder() -> Path:
    """The folder of `hydra_conf`, `sbatch` and `containers`: a clone or a working folder.

    That of the code that runs, if it is a clone's; for an installed package the working folder
    around this one, or where there is none what the wheel carries.
    """
    if _is_source(CLONE):
        return CLONE
    around = clone_around(Path.cwd())
    for folder in (around, CARRIED):
        if folder is not None and _is_source(folder):
            return folder
    raise UserError(f"no configuration tree in {CARRIED}", "install atoll again, or use its clone")


def write_working_folder(folder: Path, update: bool) -> list[Path]:
    """Copy what the wheel carries; what its user changed is kept, and named, relative to `folder`.

    Raises `UserError` rather than write over files that no `init` wrote.
    """
    if not CARRIED.is_dir():
        here = shlex.quote(str(CLONE))
        raise UserError(
            f"this atoll runs from its clone, {CLONE}, which is a working folder itself",
            f"use that one (cd {here}), or install the package: pip install {here}",
        )
    present = [name for name in PARTS if (folder / name).exists()]
    if present and not update:
        raise UserError(
            f"{folder} has a {' and a '.join(present)} already",
            "give another folder; or --update, to have this version's files in place of them",
        )
    if update and not (_is_source(folder) or (folder / WRITTEN).is_file()):
        raise UserError(
            f"{folder} is no working folder that could be updated",
            "name the one that `atoll init` wrote (inside it: .), or leave --update away",
        )
    if not update:  # one that ends early, as at a quota, is an update's to go on with
        run_dir.write_whole(folder / WRITTEN, "{}")
    before, written, kept = _written(folder), {}, []
    for path in sorted(file for name in PARTS for file in _files(CARRIED / name)):
        relative = path.relative_to(CARRIED)
        if relative.is_relative_to(OWN) and (folder / relative).exists():
            continue
        target, name, digest = folder / relative, str(relative), run_dir.sha256_of(path)
        written[name] = digest
        if target.is_file() and run_dir.sha256_of(target) not in (digest, before.get(name)):
            kept.append(relative)
            target = target.with_name(f"{target.name}.new")
        run_dir.write_whole(target, path.read_bytes())
        shutil.copymode(path, target)
    run_dir.write_whole(folder / WRITTEN, json.dumps(written, indent=1))
    _point_to_environment(folder)
    return kept


def _written(folder: Path) -> dict[str, str]:
    """The sha256 of each file that an earlier `init` wrote; without a record none is known."""
    try:
        return dict(json.loads((folder / WRITTEN).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _point_to_environment(folder: Path) -> None:
    """Have the folder's `sbatch/atoll` find this Python; an environment of its own comes first."""
    python = folder / ".venv" / "bin" / "python"
    if (folder / ".venv" / "pyvenv.cfg").exists():
        return
    begin = f"#!/bin/sh\n{_own_site()}"
    run_dir.write_whole(python, f'{begin}exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)


def _own_site() -> str:
    """A line for where pip installed atoll for its user alone, whose packages -I leaves out."""
    if not PACKAGE.is_relative_to(Path(site.getusersitepackages()).resolve()):
        return ""
    isolated = "-E -P" if sys.version_info >= (3, 11) else "-E"
    return f'[ "$1" != -I ] || {{ shift; set -- {isolated} "$@"; }}\n'


def _is_source(folder: Path) -> bool:
    return (folder / "hydra_conf" / "run.yaml").is_file()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file()]
