"""What goes into an image, and the name that follows from it."""

import hashlib
import platform
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from atoll import run_dir
from atoll.errors import UserError

# The parts of a clone that every image carries, and what of them is not the clone's. Tests are not
# among them: those of the clone are bound over an empty folder, so that a test changes no image.
PARTS = ("containers", "hydra_conf", "sbatch", "src/atoll")
FILES = ("LICENSE", "README.md", "pyproject.toml")
LEFT_OUT = ("__pycache__", "*.egg-info", "*.pyc", "local", ".hypothesis", "working_folder")
PACKAGE_FOLDERS = 6  # mount points for the machine's own package folders while an image is built
COMPRESSIONS = {"zstd": "-comp zstd -Xcompression-level 3", "gzip": "-comp gzip"}
# platform.machine() -> Apptainer's word
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Recipe:
    """One image to be: its base, where it will run, and how it is packed."""

    name: str
    arguments: dict[str, str]  # of the recipe, from the args file
    architecture: str
    compression: str
    disk_gib: int
    clone: Path

    @property
    def source(self) -> str:
        """The digest of all files of the clone that the image carries."""
        return source_digest(self.clone)

    @property
    def digest(self) -> str:
        values = [self.name, self.arguments, self.architecture, self.compression, self.source]
        return run_dir.digest(values, 12)

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.digest}.sif"

    @property
    def lock(self) -> str:
        return run_dir.sha256_of(self.clone / "containers" / "locks" / "image.txt")[:16]


def recipe(clone: Path, name: str, architecture: str | None, compression: str) -> Recipe:
    """The recipe of an image. Raises `UserError` for a name or a word that is not known."""
    bases = clone / "containers" / "bases"
    names = sorted(path.stem for path in bases.glob("*.args"))
    if name not in names:
        raise UserError(f"no image is called {name}", f"choose from: {', '.join(names)}")
    architecture = architecture or platform.machine()
    _check_word("--arch", architecture, ARCHITECTURES)
    _check_word("--compression", compression, COMPRESSIONS)
    arguments = read_arguments(bases / f"{name}.args")
    disk_gib = int(arguments.pop("disk_gib"))
    return Recipe(name, arguments, architecture, compression, disk_gib, clone)


def read_arguments(path: Path) -> dict[str, str]:
    """An args file: lines KEY=VALUE, and comments."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {key: value for key, _, value in pairs}


def build_arguments(recipe: Recipe, mirror: str, created: str) -> str:
    """The build arguments as a file: those of the base, and what is known only now."""
    labels = {
        "org.opencontainers.image.title": f"atoll-{recipe.name}",
        "org.opencontainers.image.version": version(recipe.clone),
        "org.opencontainers.image.revision": recipe.source,
        "org.opencontainers.image.created": created,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": recipe.arguments["from"],
        "atoll.lock": recipe.lock,
        "atoll.source": recipe.source,
    }
    _, pinned, digest = recipe.arguments["from"].partition("@")
    if pinned:
        labels["org.opencontainers.image.base.digest"] = digest
    words = {
        **recipe.arguments,
        "title": recipe.name,
        "mirror": mirror,
        "labels": " ".join(f"{name}={value}" for name, value in labels.items()),
    }
    return "".join(f"{name}={value}\n" for name, value in words.items())


def version(clone: Path) -> str:
    """The version of the package in a clone."""
    stated = re.search(r'^version = "(.+)"$', (clone / "pyproject.toml").read_text(), re.M)
    assert stated, "pyproject.toml states the version"
    return stated[1]


def source_files(clone: Path) -> list[Path]:
    """The files of a clone that an image carries, relative to it, in order."""
    names = [Path(name) for name in FILES]
    for part in PARTS:
        top = located(clone, Path(part))
        names += [part / path.relative_to(top) for path in top.rglob("*") if path.is_file()]
    return sorted(name for name in names if not any(map(_is_left_out, name.parts)))


def located(clone: Path, path: Path) -> Path:
    """A file of a clone; where a wheel carries the rest of one, `src/atoll` is the package."""
    if path.parts[0] != "src" or (clone / "src").is_dir():
        return clone / path
    return clone.parents[1] / path.relative_to("src")


def source_digest(clone: Path) -> str:
    """A digest of the names, contents and x-bits of what an image carries."""
    hasher = hashlib.sha256()
    for path in source_files(clone):
        file = located(clone, path)
        executable = bool(file.stat().st_mode & 0o100)
        hasher.update(f"{path}\0{executable}\0{file.stat().st_size}\0".encode())
        hasher.update(file.read_bytes())
    return hasher.hexdigest()[:16]


def stage(clone: Path, folder: Path) -> None:
    """Copy what the image carries into `folder/atoll`, with mount points."""
    for path in source_files(clone):
        target = folder / "atoll" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(located(clone, path), target)
    build = folder / "atoll" / ".build"
    for number in range(PACKAGE_FOLDERS):
        (build / str(number)).mkdir(parents=True)
    (build / "certificates").touch()
    (folder / "atoll" / "tests").mkdir()
    shutil.copy(clone / "containers" / "atoll.def", folder / "atoll.def")
    for path in (folder / "atoll").rglob("*"):  # whatever the builder's umask: all users read it
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    (folder / "atoll").chmod(0o755)


def _is_left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in LEFT_OUT)


def _check_word(option: str, word: str, known: dict[str, str]) -> None:
    if word not in known:
        raise UserError(f"{option}={word} is not known", f"choose from: {', '.join(known)}")
