"""Commands at a facility, and files to and from it: ssh and rsync, or neither on this machine."""

import shlex
import subprocess
import sys
from pathlib import Path

from atoll.errors import UserError
from atoll.settings.federation import Campaign, Site

# Unknown hosts are refused and nobody is asked; a dead line is noticed within two minutes.
SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
    "-o", "ServerAliveInterval=20", "-o", "ServerAliveCountMax=5", "-o", "ConnectTimeout=30",
)  # fmt: skip
UNREACHABLE = 255  # ssh's own exit code


class Unreachable(UserError):
    """A facility that does not answer now, and may later."""


def atoll_here() -> list[str]:
    return [sys.executable, "-m", "atoll"]


def at_site(campaign: Campaign, site: Site, words: list[str]) -> list[str]:
    """The command that runs `atoll WORDS` at a facility."""
    own = [*(site.command or atoll_here()), *words]
    return own if site.host is None else [*ssh(campaign), site.host, shlex.join(own)]


def ssh(campaign: Campaign) -> list[str]:
    return [*SSH, *campaign.ssh_options]


def home_of(campaign: Campaign, site: Site) -> Path | None:
    """The home folder at a facility that answers now, where relative paths begin; None: here."""
    if site.host is None:
        return None
    return Path(_said(campaign, site, [*ssh(campaign), site.host, "pwd"]).strip())


def ask(campaign: Campaign, site: Site, words: list[str]) -> str:
    """What a verb at a facility prints.

    Raises `Unreachable` where the line is down, and `UserError` where the verb says no.
    """
    return _said(campaign, site, at_site(campaign, site, words))


def _said(campaign: Campaign, site: Site, argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return done.stdout
    said = [line.strip() for line in done.stderr.strip().splitlines() if line.strip()]
    if site.host is not None and done.returncode == UNREACHABLE:
        raise Unreachable(
            f"{site.name} does not answer: {said[-1] if said else 'ssh failed'}",
            f"try it: {shlex.join([*ssh(campaign), site.host, 'true'])}",
        )
    found = said[-2].removeprefix("atoll: ") if len(said) > 1 else "; ".join(said) or "no reason"
    raise UserError(f"{site.name}: {found}", said[-1] if said else "look at its run folder")


def send(campaign: Campaign, site: Site, source: Path, target: str) -> None:
    """Copy a folder to a facility; what is there already is not sent again."""
    remote = target if site.host is None else f"{site.host}:{target}"
    _rsync(campaign, site, f"{source}/", f"{remote}/")


def fetch(campaign: Campaign, site: Site, source: str, target: Path) -> None:
    """Copy a folder from a facility; links and devices are never taken over."""
    target.mkdir(parents=True, exist_ok=True)
    remote = source if site.host is None else f"{site.host}:{source}"
    _rsync(campaign, site, f"{remote}/", f"{target}/", "--no-links", "--delete")


def _rsync(campaign: Campaign, site: Site, source: str, target: str, *more: str) -> None:
    """`--partial-dir` keeps what an interrupted transfer had, apart from whole files."""
    argv = ["rsync", "--recursive", "--times", "--mkpath", "--partial-dir=.rsync-partial"]
    argv += ["--timeout=300", *more]
    if site.host is not None:
        argv += ["--rsh", shlex.join(ssh(campaign))]
    try:
        done = subprocess.run([*argv, source, target], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            "there is no rsync on this machine", "install it: apt install rsync"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unreachable(
            f"{site.name}: rsync stopped: {said[0]}", "it goes on from there when it is tried again"
        )
