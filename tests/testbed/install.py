"""Install what the testbed is made of: Debian's Slurm and MariaDB, and Apptainer.

Apptainer is a package of Debian from release 14 on. An older Debian gets that package too, with
the newer C library that it needs in a folder of its own, where nothing else sees it.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NoReturn

SLURM = "munge slurmctld slurmd slurm-client slurmdbd mariadb-server slurm-wlm-torque mpich"
CONTAINERS = "uidmap squashfs-tools squashfuse fuse2fs fakeroot containernetworking-plugins"
BUILDING = "rsync openssh-client openssh-server debootstrap patchelf ca-certificates"
BROWSER = "chromium"  # opens reports, as their readers would
REHEARSING = "lmod iproute2"
PACKAGES = f"{SLURM} {CONTAINERS} {BUILDING} {BROWSER} {REHEARSING} python3".split()
OLDEST_APPTAINER = (1, 1)
RELEASE_WITH_APPTAINER, RELEASE_OF_ITS_LIBRARY = "sid", "trixie"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PRIVATE_LIBRARY = Path("/usr/local/lib/atoll-testbed")


def stop(found: str, hint: str) -> NoReturn:
    raise SystemExit(f"testbed: {found}\n         {hint}")


def run(*argv: object, **options: object) -> str:
    """Run a program to its end; its last words are ours where it fails."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        stop(f"{' '.join(words)[:120]}: {last}", "fix that, then make testbed again")
    return str(done.stdout)


def install_packages() -> None:
    missing = [name for name in PACKAGES if not _is_installed(name)]
    if not missing:
        return
    print(f"installing {' '.join(missing)}", flush=True)
    # A Debian package starts its service as it is installed; ours are started by hand, as ours.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    run("apt-get", "update", "-qq", env=environment)
    run("apt-get", "install", "-qq", "--no-install-recommends", *missing, env=environment)


def install_apptainer() -> None:
    """Apptainer from the machine's own packages where they have it, else from Debian's next."""
    if apptainer_version() >= OLDEST_APPTAINER:
        return
    if run("apt-cache", "madison", "apptainer").strip():
        run("apt-get", "install", "-qq", "--no-install-recommends", "apptainer")
        return
    mirror = debian_mirror()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        print("installing apptainer, with a C library of its own", flush=True)
        package = download(mirror, RELEASE_WITH_APPTAINER, "apptainer", folder)
        run("dpkg-deb", "--extract", package, folder / "apptainer")
        if _needs_newer_library(package):
            library = download(mirror, RELEASE_OF_ITS_LIBRARY, "libc6", folder)
            run("dpkg-deb", "--extract", library, folder / "libc6")
            give_its_own_library(folder / "apptainer", folder / "libc6")
        run("cp", "--archive", "--no-preserve=ownership", f"{folder}/apptainer/.", "/")
    if apptainer_version() < OLDEST_APPTAINER:
        stop("apptainer was installed, and does not start", "see what `apptainer version` says")


def apptainer_version() -> tuple[int, ...]:
    if shutil.which("apptainer") is None:
        return ()
    done = subprocess.run(["apptainer", "version"], capture_output=True, text=True)
    return tuple(int(part) for part in re.findall(r"\d+", done.stdout)[:2])


def debian_mirror() -> str:
    """The mirror that this machine's own apt configuration names."""
    lines = run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE) $(COMPONENT)")
    sites = [line.split() for line in lines.splitlines() if line.endswith(" main")]
    mine = [site for site, *_ in sites if "security" not in site and "debian" in site]
    if not mine or not KEYRING.exists():
        stop(
            "apptainer is not here, and no mirror of Debian to take it from",
            "install apptainer >= 1.1 (on Ubuntu from its project's own archive), then try again",
        )
    return mine[0]


def download(mirror: str, release: str, name: str, folder: Path) -> Path:
    """A package of another release, by package lists that the machine's apt never sees."""
    state = folder / release
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    sources = state / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} {release} main\n")
    lists = [
        *("-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=/nonexistent"),
        *("-o", f"Dir::State={state}", "-o", f"Dir::Cache={state}"),
        *("-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "APT::Sandbox::User=root"),
    ]
    run("apt-get", *lists, "update", "-qq")
    run("apt-get", *lists, "download", name, cwd=folder)
    return next(folder.glob(f"{name}_*.deb"))


def give_its_own_library(apptainer: Path, libc6: Path) -> None:
    """Have Apptainer's two programs load the newer C library, and nothing else of it."""
    libraries = next(libc6.rglob("libc.so.6")).parent
    PRIVATE_LIBRARY.mkdir(parents=True, exist_ok=True)
    run("cp", "--archive", f"{libraries}/.", PRIVATE_LIBRARY)
    system = next(Path("/usr/lib").glob("*-linux-gnu"))
    for program in (*apptainer.rglob("bin/starter"), apptainer / "usr/bin/apptainer"):
        loader = Path(run("patchelf", "--print-interpreter", program).strip()).name
        # RPATH, not RUNPATH: the libraries of libraries are looked for there as well.
        run(
            *("patchelf", "--set-interpreter", PRIVATE_LIBRARY / loader),
            *("--force-rpath", "--set-rpath", f"{PRIVATE_LIBRARY}:{system}", program),
        )


def open_fuse() -> None:
    """An ordinary user mounts images through FUSE."""
    if Path("/dev/fuse").exists():
        Path("/dev/fuse").chmod(0o666)


def _needs_newer_library(package: Path) -> bool:
    wanted = re.search(r"libc6 \(>= ([\d.]+)\)", run("dpkg-deb", "--field", package, "Depends"))
    here = os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0"
    return wanted is not None and _numbers(wanted[1]) > _numbers(here.split()[-1])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _is_installed(name: str) -> bool:
    asked = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", name]
    return subprocess.run(asked, capture_output=True, text=True).stdout.startswith("ii")
