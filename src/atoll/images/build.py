"""`atoll image`: build, test, sign, verify and inspect the containers that runs are started in."""

import argparse
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from atoll.commands import CommandParser, Finished, run_command
from atoll.config.stated_folders import stated_folder
from atoll.errors import UserError
from atoll.images import recipe as image_recipe
from atoll.images import sif
from atoll.images.check import check_inside
from atoll.images.package_sources import debian_mirror, pip_sources
from atoll.images.recipe import (
    ARCHITECTURES,
    COMPRESSIONS,
    PACKAGE_FOLDERS,
    Recipe,
    source_digest,
)
from atoll.settings import Run

PACKAGE = Path(__file__).resolve().parents[1]
# an installed package carries what it needs of its clone
CLONE = next(filter(Path.is_dir, [PACKAGE / "working_folder"]), PACKAGE.parents[1])
SBOM = "/opt/atoll/sbom/sbom.cdx.json"  # where containers/post.sh writes it
OLDEST = {"apptainer": (1, 3), "singularity": (4, 1)}
# what else than gzip these write: --mksquashfs-args is Apptainer's, since 1.4 (its CHANGELOG)
CHOOSES_COMPRESSION = {"apptainer": (1, 4)}


def main(argv: list[str]) -> int:
    """Do one thing with an image."""
    arguments = _parse(argv)
    return ACTIONS[arguments.action](arguments)


def build(arguments: argparse.Namespace) -> int:
    """Build an image unless there is one of the very same parts; name it by their digest."""
    compression = arguments.compression or default_compression(os.environ)
    recipe = image_recipe.recipe(CLONE, arguments.name, arguments.arch, compression)
    folder = _images(arguments).resolve()
    image = Path(arguments.cache or folder).resolve() / recipe.file_name
    if image.is_file():
        print(f"{image} is there already")
    else:
        build_new(recipe, image, arguments.mirror, dict(os.environ))
    folder.mkdir(parents=True, exist_ok=True)
    point_to(folder / f"{recipe.name}.sif", image)
    return 0


def build_new(
    recipe: Recipe, image: Path, mirror: str | None, environment: Mapping[str, str]
) -> None:
    """Build in a folder beside the image, then rename: it appears whole or not at all."""
    runtime = container_runtime(environment)
    check_compression(recipe, environment)
    image.parent.mkdir(parents=True, exist_ok=True)
    check_disk(image.parent, recipe, runtime)
    debian = recipe.arguments["bootstrap"] == "debootstrap"
    sources = pip_sources(environment, PACKAGE_FOLDERS, runtime)
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=f".{recipe.file_name}.") as name:
        folder = Path(name)
        image_recipe.stage(recipe.clone, folder)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        known = debian_mirror(mirror) if debian else "none"
        words = image_recipe.build_arguments(recipe, known, created)
        (folder / "build.args").write_text(words)
        argv = build_argv(runtime, recipe, sources.binds, can_map_users())
        print(f"building {image.name} from {recipe.arguments['from']}", flush=True)
        with _working_in(folder, sources.environment):
            _stream(argv)
        os.replace(folder / "image.sif", image)
    print(f"built {image} ({image.stat().st_size / 2**20:.0f} MiB)")


def build_argv(runtime: str, recipe: Recipe, binds: list[str], map_users: bool) -> list[str]:
    """The command that builds `image.sif` in the folder it is called in."""
    return [
        *(runtime, "build", "--build-arg-file", "build.args"),
        *(["--fakeroot"] if map_users and runtime == "apptainer" else []),
        *("--arch", ARCHITECTURES[recipe.architecture]),
        *_compressed(recipe),
        *(word for bind in binds for word in ("--bind", bind)),
        *("image.sif", "atoll.def"),
    ]


def _compressed(recipe: Recipe) -> list[str]:
    """gzip is what all of them write by themselves."""
    if recipe.compression == "gzip":
        return []
    return ["--mksquashfs-args", COMPRESSIONS[recipe.compression]]


def default_compression(environment: Mapping[str, str]) -> str:
    """zstd, unless the runtime that is here writes gzip alone."""
    found = runtime_here(environment)
    return "zstd" if found is None or chooses_compression(*found[:2]) else "gzip"


def check_compression(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Refuse to build with another compression than the runtime can write."""
    found = runtime_here(environment)
    if recipe.compression != "gzip" and found is not None and not chooses_compression(*found[:2]):
        raise UserError(
            f"--compression={recipe.compression}, and {found[0]} {found[1][0]}.{found[1][1]} "
            "writes gzip alone",
            "leave --compression out, or build with Apptainer 1.4 or newer and copy the .sif",
        )


def chooses_compression(name: str, version: tuple[int, ...]) -> bool:
    """Whether a runtime takes mksquashfs's own words."""
    return name in CHOOSES_COMPRESSION and version >= CHOOSES_COMPRESSION[name]


def test(arguments: argparse.Namespace) -> int:
    """Run the clone's tests inside an image, seeing nothing else of the host."""
    image = _image(arguments)
    if not (CLONE / "tests").is_dir():
        raise UserError(f"no tests in {CLONE}", "test an image from a clone of Atoll")
    words = [
        *(container_runtime(os.environ), "exec", "--containall", "--no-home"),
        *("--bind", f"{CLONE / 'tests'}:/opt/atoll/tests:ro"),
        *("--env", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis"),
        *("--env", "HF_HOME=/tmp/huggingface"),
        *("--pwd", "/opt/atoll", str(image)),
        *("python3", "-m", "pytest", "-p", "no:cacheprovider", *arguments.rest),
    ]
    return subprocess.run(words).returncode


def sign(arguments: argparse.Namespace) -> int:
    """Sign an image with a private key in PEM form."""
    return _with_key("sign", arguments)


def verify(arguments: argparse.Namespace) -> int:
    """Verify an image's signature with a public key in PEM form."""
    return _with_key("verify", arguments)


def inspect(arguments: argparse.Namespace) -> int:
    """Print the labels of an image: base, torch, CUDA or ROCm, lock and source digests."""
    if arguments.sbom:
        print(sbom(_image(arguments), container_runtime(os.environ)), end="")
        return 0
    known = labels(_image(arguments), container_runtime(os.environ))
    width = max(map(len, known))
    print("\n".join(f"{name:{width}}  {text}" for name, text in sorted(known.items())))
    return 0


def made_of_others(run: Run) -> str:
    """A line where a run's image was built from other sources than those here; else empty."""
    image = run.image
    if image.file is None or image.bind_source:
        return ""
    inside = sif.labels(image.file).get("atoll.source")
    try:
        here = source_digest(CLONE)
    except OSError:  # a part of a clone, to whose image the rest is left
        return ""
    if inside in (None, here):
        return ""
    return (
        f"{image.file} was built from other sources than those here, and runs those: "
        f"make image-{image.name}"
    )


def labels(image: Path, runtime: str) -> dict[str, str]:
    """The labels of an image file."""
    done = run_command([runtime, "inspect", "--json", "--labels", str(image)])
    if done.returncode != 0:
        raise UserError(f"{image}: {done.last_line}", "give a SIF file, or build one")
    attributes = json.loads(done.stdout)["data"]["attributes"]
    return {str(name): str(text) for name, text in attributes["labels"].items()}


def sbom(image: Path, runtime: str) -> str:
    """The list of packages that an image carries (CycloneDX, JSON)."""
    done = run_command([runtime, "exec", "--containall", str(image), "cat", SBOM])
    if done.returncode != 0:
        raise UserError(f"{image} has no {SBOM}: {done.last_line}", "give an image of Atoll's")
    return done.stdout


def check(arguments: argparse.Namespace) -> int:
    """In a job and inside its image: refuse what does not fit this node."""
    check_inside(Path(arguments.name))
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "build": build,
    "test": test,
    "sign": sign,
    "verify": verify,
    "inspect": inspect,
    "check": check,
}


def container_runtime(environment: Mapping[str, str]) -> str:
    """`apptainer` or SingularityCE's `singularity`, whichever is here and new enough.

    Raises `UserError` where there is none, or an old one.
    """
    found = runtime_here(environment)
    if found is None:
        raise UserError(
            "neither apptainer nor singularity is on PATH",
            "load the module of the facility, or install apptainer",
        )
    name, version, answer = found
    if version < OLDEST[name]:
        least = ".".join(str(part) for part in OLDEST[name])
        raise UserError(
            f"{answer} is too old: {least} is needed",
            "load a newer module, or build on another machine and copy the .sif",
        )
    return name


def runtime_here(environment: Mapping[str, str]) -> tuple[str, tuple[int, ...], str] | None:
    """The name of the runtime on PATH, its version, and how it says that."""
    path = environment.get("PATH", os.defpath)
    name = next((name for name in OLDEST if shutil.which(name, path=path)), None)
    if name is None:
        return None
    answer = run_command([str(shutil.which(name, path=path)), "--version"]).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", answer)[:2])
    return name, version, answer.strip()


def check_disk(folder: Path, recipe: Recipe, runtime: str) -> None:
    """Refuse to start a build that the disk has no room for, where it is unpacked and packed."""
    named = f"{runtime.upper()}_TMPDIR"
    temporary = os.environ.get(named) or tempfile.gettempdir()
    for place, setting in ((folder, "--images=FOLDER"), (Path(temporary), named)):
        free = shutil.disk_usage(place).free / 2**30
        if free < recipe.disk_gib:
            raise UserError(
                f"{place} has {free:.1f} GiB free, building {recipe.name} takes "
                f"{recipe.disk_gib} GiB",
                f"free some space, or choose another place with {setting}",
            )


def can_map_users() -> bool:
    """Whether this user has user ids of their own to build with (/etc/subuid)."""
    try:
        lines = Path("/etc/subuid").read_text().splitlines()
    except OSError:
        return False
    me = (str(os.getuid()), pwd.getpwuid(os.getuid()).pw_name)
    return any(line.partition(":")[0] in me for line in lines)


def point_to(link: Path, image: Path) -> None:
    """Make `NAME.sif` lead to the newest image of that name."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.symlink_to(image.name if image.parent == link.parent else image)
    os.replace(fresh, link)


def _stream(argv: list[str]) -> None:
    """Run a build and pass its words on as they come; its last ones become the error."""
    from spython.utils import stream_command

    lines: deque[str] = deque(maxlen=5)
    try:
        for line in stream_command(argv, sudo=False, output_type="both"):
            print(line, end="", flush=True)
            lines.append(line)
    except subprocess.CalledProcessError as error:
        ended = Finished(error.returncode, "".join(lines), "")
        fuse = "fuse" in ended.stdout.lower()
        raise UserError(
            f"{argv[0]} build ended with {ended.returncode}: {ended.last_line}",
            "let the user read and write /dev/fuse" if fuse else "see the lines above",
        ) from None


def _with_key(action: str, arguments: argparse.Namespace) -> int:
    image, key = _image(arguments), arguments.key
    if key is None or not Path(key).is_file():
        raise UserError(f"no key to {action} with: --key={key}", "give --key=FILE, in PEM form")
    argv = [container_runtime(os.environ), action, "--key", key, str(image)]
    done = subprocess.run(argv, capture_output=True, text=True)  # it may ask for a passphrase
    if done.returncode != 0:
        raise UserError(
            f"{image}: {Finished(done.returncode, done.stdout, done.stderr).last_line}",
            f"do not use it unless you know why; atoll image sign --key=PRIVATE {image} signs it",
        )
    print(f"{image}: {'signed' if action == 'sign' else 'the signature is good'}")
    return 0


def _images(arguments: argparse.Namespace) -> Path:
    return Path(arguments.images) if arguments.images else stated_folder("images")


def _image(arguments: argparse.Namespace) -> Path:
    """A file as it is, a name as the image that was built last under it."""
    given = Path(arguments.name)
    image = given if given.suffix == ".sif" else _images(arguments) / f"{arguments.name}.sif"
    if not image.is_file():
        raise UserError(f"no image {image}", f"build it: make image-{given.stem}")
    return image.resolve()


@contextmanager
def _working_in(folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Paths in the recipe are relative, so that no machine's path is kept in the image.

    spython starts a program where this process is, with its variables.
    """
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser("image", __doc__)
    parser.add_argument("action", choices=list(ACTIONS))
    parser.add_argument("name", help="cpu, cuda, … or a .sif file (check: the folder of a run)")
    parser.add_argument("--images", help="the folder of images; unset: folders.images")
    parser.add_argument("--cache", help="the folder of image files; unset: that of images")
    parser.add_argument("--arch", help="x86_64 or aarch64; unset: as this machine")
    parser.add_argument("--compression", help="zstd (unset), or gzip for older runtimes")
    parser.add_argument("--mirror", help="where Debian's packages are; unset: as apt says")
    listed = "of inspect: every package inside, as CycloneDX"
    parser.add_argument("--sbom", action="store_true", help=listed)
    parser.add_argument("--key", help="PEM file: private to sign, public to verify")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.action != "test":
        return parser.read(argv)
    arguments.rest = rest  # for pytest
    return arguments
