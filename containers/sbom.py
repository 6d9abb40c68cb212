"""What an image holds: a CycloneDX list of every package, and the labels that say its versions.

Runs inside the image, with its own Python and nothing else.
"""

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys


def system_packages() -> list[dict[str, str]]:
    if shutil.which("dpkg-query") is None:
        return []
    form = "--showformat=${Package} ${Version} ${Architecture}\n"
    lines = subprocess.run(["dpkg-query", "--show", form], capture_output=True, text=True).stdout
    return [
        component(f"pkg:deb/{name}@{version}?arch={architecture}", name, version)
        for name, version, architecture in (line.split() for line in lines.splitlines())
    ]


def python_packages() -> list[dict[str, str]]:
    found = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    return [
        component(f"pkg:pypi/{name.lower()}@{version}", name, version)
        for name, version in sorted(found.items())
    ]


def component(address: str, name: str, version: str) -> dict[str, str]:
    return {"type": "library", "name": name, "version": version, "purl": address}


def sbom(title: str) -> dict[str, object]:
    """A bill of materials (CycloneDX 1.5, JSON)."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": title}},
        "components": [*system_packages(), *python_packages()],
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
        print(json.dumps(sbom(sys.argv[1]), indent=1))
