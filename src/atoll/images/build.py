"""`atoll image`: build, test, sign, verify and inspect the containers that runs are started in."""

import argparse
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from atoll.errors import UserError
from atoll.images import recipe as image_recipe
from atoll.images.check import check_inside
from atoll.images.package_sources import debian_mirror, pip_sources
from atoll.images.recipe import ARCHITECTURES, COMPRESSIONS, HELD_FOLDERS, Recipe

CLONE = Path(__file__).resolve().parents[3]
OLDEST = {"apptainer": (1, 3), "singularity": (4, 1)}


def main(argv: list[str]) -> int:
    """Do one thing with an image."""
    arguments = _parse(argv)
    return ACTIONS[arguments.action](arguments)


def build(arguments: argparse.Namespace) -> int:
    """Build an image unless there is one of the very same parts; name it by their digest."""
    recipe = image_recipe.recipe(
        CLONE, arguments.name, arguments.arch, arguments.compression or "zstd"
    )
    folder = Path(arguments.images).resolve()
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
    image.parent.mkdir(parents=True, exist_ok=True)
    check_disk(image.parent, recipe)
    debian = recipe.arguments["bootstrap"] == "debootstrap"
    sources = pip_sources(environment, HELD_FOLDERS)
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=f".{recipe.file_name}.") as name:
        folder = Path(name)
        image_recipe.stage(recipe.clone, folder)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        known = debian_mirror(mirror) if debian else "none"
        words = image_recipe.build_arguments(recipe, known, created)
        (folder / "build.args").write_text(words)
        argv = build_argv(runtime, recipe, sources.binds, can_map_users())
        print(f"building {image.name} from {recipe.arguments['from']}", flush=True)
        with _in_folder(folder), _variables(sources.environment):
            _stream(argv)
        os.replace(folder / "image.sif", image)
    print(f"built {image} ({image.stat().st_size / 2**20:.0f} MiB)")


def build_argv(runtime: str, recipe: Recipe, binds: list[str], map_users: bool) -> list[str]:
    """The command that builds `image.sif` in the folder it is called in."""
    return [
        *(runtime, "build", "--build-arg-file", "build.args"),
        *(["--fakeroot"] if map_users and runtime == "apptainer" else []),
        *("--arch", ARCHITECTURES[recipe.architecture]),
        *("--mksquashfs-args", COMPRESSIONS[recipe.compression]),
        *(word for bind in binds for word in ("--bind", bind)),
        *("image.sif", "atoll.def"),
    ]


def test(arguments: argparse.Namespace) -> int:
    """Run pytest on the tests that are inside an image, seeing nothing of the host."""
    image = _image(arguments)
    words = [
        *(container_runtime(os.environ), "exec", "--containall", "--no-home"),
        *("--env", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis"),
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
    found = labels(_image(arguments), container_runtime(os.environ))
    width = max(len(name) for name in found)
    print("\n".join(f"{name:{width}}  {text}" for name, text in sorted(found.items())))
    return 0


def labels(image: Path, runtime: str) -> dict[str, str]:
    """The labels of an image file."""
    argv = [runtime, "inspect", "--json", "--labels", str(image)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{image}: {_last_line(done.stderr)}", "give a SIF file, or build one")
    found = json.loads(done.stdout)["data"]["attributes"]["labels"]
    return {str(name): str(text) for name, text in found.items()}


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
    path = environment.get("PATH", os.defpath)
    found = {name: shutil.which(name, path=path) for name in OLDEST}
    name = next((name for name in OLDEST if found[name]), None)
    if name is None:
        raise UserError(
            "neither apptainer nor singularity is on PATH",
            "load the module of the facility, or install apptainer",
        )
    answer = subprocess.run([str(found[name]), "--version"], capture_output=True, text=True).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", answer)[:2])
    if version < OLDEST[name]:
        least = ".".join(str(part) for part in OLDEST[name])
        raise UserError(
            f"{answer.strip()} is too old: {least} is needed",
            "load a newer module, or build on another machine and copy the .sif",
        )
    return name


def check_disk(folder: Path, recipe: Recipe) -> None:
    """Refuse to start a build that the disk has no room for, where it is unpacked and packed."""
    temporary = os.environ.get("APPTAINER_TMPDIR") or tempfile.gettempdir()
    for place, setting in ((folder, "--images=FOLDER"), (Path(temporary), "APPTAINER_TMPDIR")):
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
    me = {str(os.getuid()), os.environ.get("USER", ""), _user_name()}
    return any(line.partition(":")[0] in me for line in lines)


def point_to(link: Path, image: Path) -> None:
    """Make `NAME.sif` lead to the newest image of that name."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.symlink_to(image.name if image.parent == link.parent else image)
    os.replace(fresh, link)


def _user_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _stream(argv: list[str]) -> None:
    """Run a build and pass its words on as they come; its last ones become the error."""
    from spython.utils import stream_command

    last: list[str] = []
    try:
        for line in stream_command(argv, sudo=False, output_type="both"):
            print(line, end="", flush=True)
            last = [*last[-4:], line.strip()] if line.strip() else last
    except subprocess.CalledProcessError as error:
        fuse = any("fuse" in line.lower() for line in last)
        raise UserError(
            f"{argv[0]} build ended with {error.returncode}: {_last_line(chr(10).join(last))}",
            "let the user read and write /dev/fuse" if fuse else "see the lines above",
        ) from None


def _with_key(action: str, arguments: argparse.Namespace) -> int:
    image, key = _image(arguments), arguments.key
    if key is None or not Path(key).is_file():
        raise UserError(f"no key to {action} with: --key={key}", "give --key=FILE, in PEM form")
    argv = [container_runtime(os.environ), action, "--key", key, str(image)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(
            f"{image}: {_last_line(done.stderr)}",
            f"do not use it unless you know why; atoll image sign --key=PRIVATE {image} signs it",
        )
    print(f"{image}: {'signed' if action == 'sign' else 'the signature is good'}")
    return 0


def _image(arguments: argparse.Namespace) -> Path:
    """A file as it is, a name as the image that was built last under it."""
    given = Path(arguments.name)
    image = given if given.suffix == ".sif" else Path(arguments.images) / f"{arguments.name}.sif"
    if not image.is_file():
        raise UserError(f"no image {image}", f"build it: make image-{given.stem}")
    return image.resolve()


def _last_line(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    return (plain or "no reason given").splitlines()[-1]


@contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Paths in the recipe are relative, so that no machine's path is kept in the image."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="atoll image", description=__doc__)
    parser.add_argument("action", choices=list(ACTIONS))
    parser.add_argument("name", help="cpu, cuda, … or a .sif file (check: the folder of a run)")
    parser.add_argument("--images", default="images", help="the folder of images")
    parser.add_argument("--cache", help="the folder of image files; unset: that of images")
    parser.add_argument("--arch", help="x86_64 or aarch64; unset: as this machine")
    parser.add_argument("--compression", help="zstd (unset), or gzip for older runtimes")
    parser.add_argument("--mirror", help="where Debian's packages are; unset: as apt says")
    parser.add_argument("--key", help="PEM file: private to sign, public to verify")
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.action != "test":
        raise UserError(f"unknown option: {rest[0]}", "atoll image --help lists them")
    arguments.rest = rest
    return arguments
