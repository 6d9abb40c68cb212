"""What an image holds: a CycloneDX list of every package, and the labels that say its versions.

Runs inside the image, with its own Python and nothing else.
"""

import hashlib
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

Component = dict[str, object]


def system_packages() -> list[Component]:
    if shutil.which("dpkg-query") is None:
        return []
    form = "--showformat=${Package} ${Version} ${Architecture}\n"
    lines = subprocess.run(["dpkg-query", "--show", form], capture_output=True, text=True).stdout
    system = platform.freedesktop_os_release()["ID"]
    return [
        component(f"pkg:deb/{system}/{name}@{quote(version)}?arch={architecture}", name, version)
        for name, version, architecture in (line.split() for line in lines.splitlines())
    ]


def python_packages(lock: str) -> list[Component]:
    """Every distribution, with the digest of its list of files (RECORD), and those of the lock."""
    locked = locked_files(lock)
    found = {normal(item.metadata["Name"]): item for item in importlib.metadata.distributions()}
    components = []
    for name, item in sorted(found.items()):
        part = component(f"pkg:pypi/{name}@{quote(item.version)}", name, item.version)
        record = item.read_text("RECORD")
        known = [("atoll:record:sha256", digest(record))] if record else []
        known += [("atoll:lock:sha256", x) for x in locked.get((name, item.version), [])]
        properties = [{"name": key, "value": value} for key, value in known]
        components.append(part | ({"properties": properties} if properties else {}))
    return components


def locked_files(lock: str) -> dict[tuple[str, str], list[str]]:
    """Name and version -> the digests of the files, one of which pip installed."""
    found: dict[tuple[str, str], list[str]] = {}
    at = ("", "")
    for line in lock.splitlines():
        if stated := re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;\\]+)", line):
            at = (normal(stated[1]), stated[2])
        found.setdefault(at, []).extend(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return found


def normal(name: str) -> str:
    """As the package index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def component(address: str, name: str, version: str) -> Component:
    return {
        "type": "library",
        "bom-ref": address,
        "name": name,
        "version": version,
        "purl": address,
    }


def sbom(title: str, lock: str = "") -> dict[str, object]:
    """A bill of materials (CycloneDX 1.5, JSON)."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": title}},
        "components": [*system_packages(), *python_packages(lock)],
    }


def built_for(flags: str) -> str:
    """torch's own list, sm_80 sm_90a compute_120 gfx90a, as 8.0 9.0 12.0+PTX gfx90a."""
    words = []
    for kind, number in re.findall(r"\b(sm_|compute_|gfx)([0-9a-f]+)", flags):
        if kind == "gfx":
            words.append(kind + number)
        else:
            digits = number.rstrip("abcdef")
            words.append(f"{digits[:-1]}.{digits[-1]}{'+PTX' if kind == 'compute_' else ''}")
    return " ".join(words)


def labels() -> dict[str, str]:
    """The versions that a job compares with its node."""
    import torch

    found = {
        "atoll.torch": torch.__version__,
        "atoll.python": platform.python_version(),
        "atoll.architecture": platform.machine(),
        "atoll.cuda": torch.version.cuda,
        "atoll.rocm": torch.version.hip,
        "atoll.devices": built_for(getattr(torch._C, "_cuda_getArchFlags", str)() or ""),
    }
    return {name: str(value) for name, value in found.items() if value}


if __name__ == "__main__":
    if sys.argv[1] == "--labels":
        print("\n".join(f"{name} {value}" for name, value in labels().items()))
    else:
        lock = "".join(Path(name).read_text() for name in sys.argv[2:])
        print(json.dumps(sbom(sys.argv[1], lock), indent=1))
