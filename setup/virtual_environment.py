"""Make a virtual environment that has pip, on a machine that may have neither pip nor ensurepip.

Debian and Ubuntu ship Python without ensurepip. There, pip comes from their own package of it,
which apt-get downloads from the machine's mirror, without root and without installing anything.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import NoReturn

SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")  # where Debian's pip looks
MEND = "Install what is missing: apt install python3-venv ca-certificates"


def stop(found: str, hint: str) -> NoReturn:
    raise SystemExit(f"{found}\n{hint}")


def run(*argv: object, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(part) for part in argv], cwd=cwd, capture_output=True, text=True)


def last_line(text: str) -> str:
    return (text.strip() or "no reason given").splitlines()[-1]


def python_and_pip_work(folder: Path) -> bool:
    python = folder / "bin" / "python"
    if not python.exists():
        return False
    version = run(python, "-c", "import sys; print(sys.version)").stdout.rstrip("\n")
    return version == sys.version and run(python, "-Im", "pip", "--version").returncode == 0


def download_debian_package(name: str, folder: Path) -> None:
    """Unpack Debian package `name` into `folder`, by the machine's package lists or fresh ones."""
    if shutil.which("apt-get") is None:
        stop(
            f"{sys.executable} has no ensurepip, so no environment with pip can be made.",
            "Install Python's venv support, or name another Python: make setup PYTHON=...",
        )
    state = folder / "apt"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    own_lists = [
        *("-o", f"Dir::State={state}", "-o", f"Dir::Cache={state}"),
        *("-o", "Dir::State::status=/var/lib/dpkg/status"),
    ]
    answer = run("apt-get", "download", name, cwd=folder)
    if answer.returncode != 0:
        run("apt-get", *own_lists, "update", cwd=folder)
        answer = run("apt-get", *own_lists, "download", name, cwd=folder)
    if answer.returncode != 0:
        stop(
            f"{sys.executable} has no ensurepip, and apt-get cannot download {name}: "
            f"{last_line(answer.stderr)}",
            MEND,
        )
    run("dpkg-deb", "--extract", next(folder.glob(f"{name}_*.deb")), folder).check_returncode()


def trust_certificates_of_debian(environment: Path, folder: Path) -> None:
    """Tell the environment's pip which authorities to trust, where the machine has no list."""
    download_debian_package("ca-certificates", folder)
    trusted = sorted(folder.glob("usr/share/ca-certificates/**/*.crt"))
    bundle = environment / "ca-certificates.crt"
    bundle.write_text("".join(path.read_text() for path in trusted))
    (environment / "pip.conf").write_text(f"[global]\ncert = {bundle}\n")


def install_pip_of_debian(environment: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not SYSTEM_CERTIFICATES.exists():
            trust_certificates_of_debian(environment, folder)
        download_debian_package("python3-pip-whl", folder)
        wheel = next(folder.glob("usr/share/python-wheels/pip-*.whl"))
        python = environment / "bin" / "python"
        answer = run(python, "-I", wheel / "pip", "install", "--no-index", wheel)
        if answer.returncode != 0:
            stop(
                f"pip from {wheel.name} cannot install itself: {last_line(answer.stderr)}",
                MEND,
            )


def main(folder: Path) -> None:
    if python_and_pip_work(folder):
        return
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        stop(f"{folder} exists and is no virtual environment.", "Move it away, then try again.")
    venv.create(folder, clear=True, symlinks=True)
    if run(folder / "bin" / "python", "-Im", "ensurepip", "--default-pip").returncode != 0:
        install_pip_of_debian(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
