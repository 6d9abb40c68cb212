"""Which of the host's folders a container sees; none may hide what its image needs."""

import os
from contextlib import suppress
from fnmatch import fnmatch
from glob import escape, glob
from pathlib import Path, PurePosixPath

from atoll.errors import UserError
from atoll.settings import Run

PACKAGE, PACKAGE_INSIDE = Path(__file__).parents[1], "/opt/atoll/src/atoll"
FABRIC = "/opt/atoll/fabric"  # 0 to 3 stand first in every image's LD_LIBRARY_PATH
# What every image keeps its programs and ours in; `image.needs` adds what its base has elsewhere.
NEEDED = ("/opt/atoll", "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/.singularity.d")

# Each node's own, also where the login node has one of that name; apptainer shows them itself.
NODES_OWN = ("/tmp", "/var/tmp", "/dev/shm")
SPLITS = ",:^"  # where apptainer's --bind begins another bind, a target, or another word


def binds(run: Run) -> list[str]:
    """The facility's mounts, then the folders of the run itself, links followed."""
    folders: dict[str, str] = {}
    given = (_there(folder, run) for folder in _given_files(run))
    for path in sorted({str(path) for path in (*_made(run), *given, *_behind_links(run))}):
        if any(_is_inside(path, other) for other in folders):
            continue
        folders |= bound(path, run)
    source = [f"{PACKAGE}:{PACKAGE_INSIDE}"] if run.image.bind_source else []
    on_node = [] if run.facility.node_folder is None else [str(run.facility.node_folder)]
    return [*run.facility.binds, *on_node, *_fabric(run), *source, *folders.values()]


def _is_inside(path: str, other: str) -> bool:
    """Whether a folder is there where the other one is, under its own name: no link leads away."""
    if not path.startswith(f"{other}/"):
        return False
    return os.path.realpath(path) == os.path.realpath(other) + path[len(other) :]


def own_folders(run: Run) -> list[Path]:
    """The folders that a run itself reads and writes."""
    return [*_made(run), *_given_files(run), *_behind_links(run)]


def _made(run: Run) -> list[Path]:
    """Those that are made where they are not there yet."""
    return [run.folders.runs, run.folders.prepared, *shared_caches(run).values()]


def shared_caches(run: Run) -> dict[str, Path]:
    """The caches that a job finds where this machine has them; the others its ranks make."""
    own = run.facility.node_folder
    if run.facility.scheduler == "none":
        return run.folders.caches
    places = [*NODES_OWN, *([str(own)] if own else [])]
    caches = run.folders.caches.items()
    return {name: path for name, path in caches if not any(map(path.is_relative_to, places))}


def _fabric(run: Run) -> list[str]:
    """The host's plugin where it is, and the libraries it needs where the image looks for them."""
    network = run.facility.network
    plugin = [] if network.plugin is None else [str(network.plugin.parent)]
    libraries = [f"{folder}:{FABRIC}/{i}" for i, folder in enumerate(network.libraries)]
    return [*plugin, *libraries]


def bound(path: str, run: Run) -> dict[str, str]:
    """Of a folder under the name it was given, wherever its links lead: place -> bind.

    Before it the place where they lead: of a link in a home folder, that a container has before its
    binds, the link itself stands there, and the bind goes where it leads.
    """
    real = os.path.realpath(path)
    if real == path:
        return {path: path}
    first = {} if _is_of_image(real, run) else {real: real}
    return first | {path: f"{real}:{path}"}


def check_binds(run: Run) -> None:
    """Refuse a mount over a folder that the image needs: what lies below it is hidden."""
    if run.image.file is None:
        return
    for path in own_folders(run):
        odd = sorted(set(SPLITS) & {*str(path), *os.path.realpath(path)})
        if odd:
            raise UserError(
                f"{path}: {' '.join(odd)} in its name, where apptainer's --bind begins another "
                "word",
                "give the folder another name; a link does not help",
            )
    for bind in binds(run):
        inside = _inside(bind)
        hidden = [path for path in (*NEEDED, *run.image.needs) if _covers(inside, path)]
        if hidden:
            raise UserError(
                f"bind {bind} hides {', '.join(hidden)} of image={run.image.name}",
                f"bind what is needed below {inside}, in facility.binds, or use another folder",
            )


def _inside(bind: str) -> str:
    """Where a bind SOURCE[:TARGET[:OPTIONS]] lies in the container."""
    source, _, rest = bind.partition(":")
    return os.path.normpath(rest.partition(":")[0] or source)


def _covers(folder: str, path: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _given_files(run: Run) -> list[Path]:
    """The folders of the model, tokenizer, text files and data sets that a run names by path."""
    return [path if path.is_dir() else _first_folder(path) for path in _named(run)]


def _there(folder: Path, run: Run) -> Path:
    """The folder, or what is above one that has been put away: no container begins without it.

    Where that would hide what the image needs it stays: it is mistyped, or another machine's.
    """
    above = (each for each in (folder, *folder.parents) if each.is_dir())
    found = next(above, folder)
    return folder if _is_of_image(str(found), run) else found


def _is_of_image(folder: str, run: Run) -> bool:
    """Whether a folder is, holds or lies in one that the image needs."""
    return any(_covers(folder, own) or _covers(own, folder) for own in (*NEEDED, *run.image.needs))


def _behind_links(run: Run) -> list[Path]:
    """Where the files that a run names, or those in a folder of it, are links to.

    By the name that a link says, and by its real one. What the image has itself stays its own. Of
    a cache those right in it: the others stay inside.
    """
    links = [link for path in _named(run) for link in _links(str(path))]
    for cache in shared_caches(run).values():
        links += filter(os.path.islink, glob(f"{escape(str(cache))}/*"))
    said = [os.path.join(os.path.dirname(link), os.readlink(link)) for link in links]
    targets = [*map(os.path.normpath, said), *map(os.path.realpath, links)]
    there = [path for path in targets if os.path.exists(path)]
    folders = {path if os.path.isdir(path) else os.path.dirname(path) for path in there}
    return [Path(folder) for folder in folders if not _is_of_image(folder, run)]


def _links(path: str) -> list[str]:
    """Those among what a path or a pattern means; in a folder at any depth, as text is found.

    Of a pattern the folders above, too: `/data/*/*.txt` goes through links of `/data`.
    """
    if not os.path.isdir(path) and "**" in Path(path).parts:  # glob would follow them in circles
        found, name = _links(str(_first_folder(Path(path)))), Path(path).name
        return [link for link in found if os.path.isdir(link) or fnmatch(Path(link).name, name)]
    if not os.path.isdir(path):
        above = [folder for folder in map(str, Path(path).parents) if set("*?[") & set(folder)]
        return [found for each in (path, *above) for found in glob(each) if os.path.islink(found)]
    links, folders = [], [path]
    while folders:  # os.walk would ask the file system once more for each of a million files
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    links.append(entry.path)
                elif entry.is_dir():
                    folders.append(entry.path)
    return links


def _named(run: Run) -> list[Path]:
    """The absolute paths among what a run names; each may be a pattern."""
    named = [run.model.source, run.tokenizer.path, run.evaluation.tasks_folder]
    texts = [] if run.folders.bundle else run.data.each  # whose tokens a bundle has
    named += [file for data in texts for file in (*data.files, *data.validation.files)]
    named += [data.hub and os.path.expanduser(data.hub) for data in texts]
    saved, adapter = run.checkpoint, run.model.lora and run.model.lora.start
    others = (run.folders.bundle, adapter, saved.initial_load_path, saved.optimizer_load_path)
    named += [str(path) for path in others if path]
    return [Path(name) for name in named if name and name.startswith("/")]


def _first_folder(path: Path) -> Path:
    """The folder above a file, or above the first star of a pattern."""
    plain = [part for part in path.parents if not set("*?[") & set(str(part))]
    return plain[0]
