"""What an image holds: a CycloneDX list of every package, and the labels that say its versions.

Runs inside the image, with its own Python and nothing else.
"""

import importlib.metadata
import json
import platform
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


def labels() -> dict[str, str]:
    """The versions that a job compares with its node."""
    import torch

    found = {
        "atoll.torch": torch.__version__,
        "atoll.python": platform.python_version(),
        "atoll.architecture": platform.machine(),
        "atoll.cuda": torch.version.cuda,
        "atoll.rocm": torch.version.hip,
    }
    return {name: str(value) for name, value in found.items() if value}


if __name__ == "__main__":
    if sys.argv[1] == "--labels":
        print("\n".join(f"{name} {value}" for name, value in labels().items()))
    else:
        print(json.dumps(sbom(sys.argv[1]), indent=1))
