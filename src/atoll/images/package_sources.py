"""Where this machine takes packages from, so that an image built on it can do the same.

Nothing of it is written anywhere: pip's settings reach the build as environment, its folders
and certificates as mounts, and Debian's mirror is the one in apt's own configuration.
"""

import ast
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.commands import run_command
from atoll.errors import UserError

# Of pip's settings, those that say where packages are.
LISTS = ("index-url", "extra-index-url", "find-links", "trusted-host")
INSIDE = "/opt/atoll/.build"


@dataclass(frozen=True)
class Sources:
    """The environment and the mounts with which pip inside a build finds its packages."""

    environment: dict[str, str]
    binds: list[str]


def pip_sources(environment: Mapping[str, str], most_folders: int, runtime: str) -> Sources:
    """pip's own sources on this machine, with local folders under names inside the build.

    runtime: apptainer or singularity, each of which reads variables of its own name.

    Raises `UserError` if there are more folders than mount points.
    """
    settings = pip_settings()
    inside: dict[str, str] = {}
    passed = {}
    for name in LISTS:
        words = [_inside(word, inside) for word in settings.get(name, "").split()]
        if words:
            passed[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(words)
    if len(inside) > most_folders:
        raise UserError(
            f"pip takes packages from {len(inside)} folders here: {', '.join(inside)}",
            f"join them: a build has mount points for {most_folders}",
        )
    binds = [f"{folder}:{mount}" for folder, mount in inside.items()]
    certificates = settings.get("cert") or environment.get("SSL_CERT_FILE")
    if certificates and Path(certificates).is_file():
        binds.append(f"{os.path.realpath(certificates)}:{INSIDE}/certificates")
        passed |= {"PIP_CERT": f"{INSIDE}/certificates", "SSL_CERT_FILE": f"{INSIDE}/certificates"}
    prefix = f"{runtime.upper()}ENV_"
    return Sources({f"{prefix}{name}": text for name, text in passed.items()}, binds)


def pip_settings() -> dict[str, str]:
    """pip's settings from its files and variables; a variable wins."""
    lines = run_command([sys.executable, "-m", "pip", "config", "list"]).stdout.splitlines()
    settings: dict[str, str] = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        text = str(ast.literal_eval(value)).replace("\n", " ")
        # a list in a file and one in the environment are both meant
        both = key in LISTS and key != "index-url" and key in settings
        settings[key] = f"{settings[key]} {text}" if both else text
    return settings


def debian_mirror(given: str | None) -> str:
    """The mirror that was given, or the one of this machine's own apt configuration."""
    if given:
        return given
    argv = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(SITE) $(COMPONENT)"]
    targets = [line.split() for line in run_command(argv).stdout.splitlines()]
    sites = [target[1] for target in targets if len(target) > 1 and target[0] == "Debian"]
    if not sites:
        raise UserError(
            "no mirror of Debian is known here: apt's configuration names none",
            "give one: --mirror=ADDRESS",
        )
    return sites[0]


def _inside(word: str, inside: dict[str, str]) -> str:
    """A word of pip's settings as the build sees it; folders are added to `inside`."""
    scheme, plain = ("file://", word.removeprefix("file://")) if "file://" in word else ("", word)
    if not plain.startswith("/"):
        return word
    folder = next((known for known in inside if f"{plain}/".startswith(f"{known}/")), None)
    if folder is None:
        folder = str(Path(plain).parent if scheme else Path(plain))
        inside[folder] = f"{INSIDE}/{len(inside)}"
    return f"{scheme}{inside[folder]}{plain.removeprefix(folder)}"
