"""Commands at a facility, and files to and from it: ssh and rsync, or neither on this machine."""

import errno
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atoll.campaign.calls import CUT_OFF, NO_ANSWER, Over, call, never
from atoll.commands import run_command
from atoll.errors import UserError, printable
from atoll.settings.exchange import SHOWN
from atoll.settings.federation import Campaign, Site

# Unknown hosts are refused and nobody is asked; a dead line is noticed within two minutes. Nothing
# is lent to a facility: with the agent it could log in at the others.
SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
    "-o", "ServerAliveInterval=20", "-o", "ServerAliveCountMax=5", "-o", "ConnectTimeout=30",
    "-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes",
)  # fmt: skip
SSH_FAILED = 255  # ssh's own exit code
# rsync's manual, EXIT VALUES: socket, stream, timeout, no connection; and ssh's own
CONNECTION_CODES = {10, 12, 30, 35, SSH_FAILED}
SSH_SECONDS = 120.0
PROBE_BYTES = 1 << 20
PARTS = ".rsync-partial"  # of what a transfer was cut off in
# rsync compares lengths with the list that it got, and then writes whatever comes. So the kernel
# ends a file there, with an error in place of a signal, as Python sets it up. And it ends with us
# (prctl(2): PR_SET_PDEATHSIG, SIGTERM): else it would go on in a folder that another one takes.
LIMITED = (
    "import ctypes, os, resource, sys; most, parent = map(int, sys.argv[1:3]);"
    "ctypes.CDLL(None).prctl(1, 15); os.getppid() == parent or sys.exit(1);"
    "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1];"
    "most = most if hard == resource.RLIM_INFINITY else min(most, hard);"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)); os.execvp(sys.argv[3], sys.argv[3:])"
)
LEAST_LIMIT_BYTES = 1 << 20  # ssh writes small files of its own
# What does not mend itself, though the line is cut as if it were down: ssh's refusals, and words of
# the other side (mkdir, login shell, rrsync) before its rsync begins. Which code rsync ends with
# then depends on which of the two is faster.
REFUSED = re.compile(
    r"rsync.*not found|not found.*rsync|mkdir: |rrsync|quota.*exceeded|exceeded.*quota"
    r"|Permission denied \([^0-9]|Host key verification failed|HOST IDENTIFICATION HAS CHANGED"
    r"|Too many authentication failures|Unable to negotiate|Bad (owner|configuration)"
    r"|account .*(not available|expired|locked|disabled)",
    re.IGNORECASE,
)


TOO_LARGE = os.strerror(errno.EFBIG)
WITHOUT_SAFE_PATH = (  # for Python 3.10, which has no -P
    "import runpy, sys; sys.path[:] = filter(None, sys.path); "
    "runpy.run_module('atoll', run_name='__main__', alter_sys=True)"
)


class Unreachable(UserError):
    """A facility that does not answer now, and may later."""

    has_begun = False  # it was at what it was asked for, or its model was on the way
    is_sent_to = False  # it was its model alone


class NoRoom(UserError):
    """The disk of this machine is full: no facility's failure."""


def refuse_full_disk(folder: Path) -> None:
    """Raise `NoRoom` where not even a little can be written any more."""
    probe = folder / ".room"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return
        hint = "free some space here, and type the same line again: what came is kept"
        raise NoRoom(f"nothing more can be written to {folder}: {error.strerror}", hint) from None
    finally:
        probe.unlink(missing_ok=True)


def atoll_here() -> list[str]:
    """This Atoll, whatever modules lie in the working folder: `-m` alone would take those."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", "atoll"]
    return [sys.executable, "-c", WITHOUT_SAFE_PATH]


def at_site(campaign: Campaign, site: Site, words: list[str]) -> list[str]:
    """The command that runs `atoll WORDS` at a facility."""
    own = [*(site.command or atoll_here()), *words]
    return own if site.host is None else [*ssh(campaign), "--", site.host, shlex.join(own)]


def ssh(campaign: Campaign) -> list[str]:
    return [*SSH, *campaign.ssh_options]


def home_of(campaign: Campaign, site: Site) -> Path | None:
    """The home folder at a facility that answers now, where relative paths begin; None: here."""
    if site.host is None:
        return None
    end = time.monotonic() + SSH_SECONDS
    argv = [*ssh(campaign), "--", site.host, "pwd"]
    home = _output(campaign, site, argv, lambda _: time.monotonic() > end).strip()
    if not re.fullmatch(r"/[^\x00-\x1f\x7f]*", home):
        raise UserError(
            f"{site.name}: `pwd` printed {printable(home, 80)!r}, which is no folder",
            "its login shell must print nothing of itself (.bashrc)",
        )
    return Path(home)


def ask(campaign: Campaign, site: Site, words: list[str], over: Over = never) -> str:
    """What a command at a facility prints, until it is `over`.

    Raises `Unreachable` where the line is down or there is no answer, and `UserError` where the
    command says no.
    """
    return _output(campaign, site, at_site(campaign, site, words), over)


def run_atoll(argv: list[str], what: str) -> str:
    """What a command on this machine prints; `UserError` with its own reason where it says no."""
    done = run_command(argv)
    if done.returncode:
        found, hint = complaint(done.stderr)
        raise UserError(f"{what} cannot be made: {found}", hint)
    return done.stdout


def complaint(stderr: str) -> tuple[str, str]:
    """Found and hint of a command that said no, else the last line of whatever ended."""
    lines = _lines(stderr)
    ours = [n for n, line in enumerate(lines) if line.startswith("atoll: ")]
    if not ours:
        last = printable(lines[-1], SHOWN) if lines else "no reason was given"
        return last, "look at its run folder"
    found, *hints = [printable(line, SHOWN) for line in lines[ours[-1] :][:3]]
    return found.removeprefix("atoll: "), " ".join(hints) or "look at its run folder"


def _output(campaign: Campaign, site: Site, argv: list[str], over: Over) -> str:
    done = call(argv, over)
    if done.returncode == 0:
        return done.stdout
    failed = site.host is not None and done.returncode == SSH_FAILED
    if failed or done.returncode in (NO_ANSWER, CUT_OFF):
        words = [*ssh(campaign), "--", site.host or "", "true"] if site.host else argv
        hint, refused = f"try it: {shlex.join(words)}", _refusals(done.stderr)
        if failed and refused:
            raise UserError(f"{site.name} refuses ssh: {refused[-1]}", hint)
        last = printable((_lines(done.stderr) or ["ssh failed"])[-1], SHOWN)
        error = Unreachable(f"{site.name} does not answer: {last}", hint)
        error.has_begun = done.returncode == CUT_OFF
        raise error
    found, hint = complaint(done.stderr)
    raise UserError(f"{site.name}: {found}", hint)


def send(
    campaign: Campaign,
    site: Site,
    source: Path,
    target: str,
    kinds: Sequence[str] = (),
    over: Over = never,
) -> None:
    """Copy a folder, or its files of these kinds; what is there already is not sent again."""
    only = [f"--include=*{kind}" for kind in kinds] + (["--exclude=*"] if kinds else [])
    if site.host is None:
        Path(target).mkdir(parents=True, exist_ok=True)
        _rsync(campaign, site, [*only, "--", f"{source}/", f"{target}/"], over)
    else:  # the folders above: rsync's own --mkpath came with 3.2.3, RHEL 8 has 3.1.3
        program = f"mkdir -p -- {shlex.quote(target)} && rsync"
        far = f"{site.host}:{target}/"
        words = [f"--rsync-path={program}", *only, "--", f"{source}/", far]
        _rsync(campaign, site, words, over)


def fetch(
    campaign: Campaign,
    site: Site,
    source: str,
    target: Path,
    names: Sequence[str] | None = None,
    most_bytes: int | None = None,
    over: Over = never,
) -> None:
    """Copy plain files of a folder at a facility; links and devices are never taken over.

    names: these alone (else all), and none that is longer than `most_bytes`; what is here beside
    them stays. A longer one is an error, also where it grows while it comes.
    """
    target.mkdir(parents=True, exist_ok=True)
    remote = source if site.host is None else f"{site.host}:{source}"
    words = ["--no-links", "--no-devices", "--no-specials"]
    if names is not None:
        words += [*(f"--include=/{name}" for name in names), "--exclude=*"]
    if most_bytes is not None:
        words.append(f"--max-size={most_bytes}")
    _rsync(campaign, site, [*words, "--", f"{remote}/", f"{target}/"], over, most_bytes)


def _rsync(
    campaign: Campaign, site: Site, words: list[str], over: Over, most_bytes: int | None = None
) -> None:
    """`--partial-dir` keeps what an interrupted transfer had, apart from whole files.

    most_bytes: of a file that it writes. Raises `Unreachable` where the line is down, and
    `UserError` with rsync's words for all that does not mend itself: a full disk, a permission, a
    key, an rsync that is not there.
    """
    if shutil.which("rsync") is None:
        raise UserError("there is no rsync on this machine", "install it: apt install rsync")
    argv = ["rsync", "--recursive", "--times", f"--partial-dir={PARTS}", "--timeout=300"]
    if site.host is not None:
        argv += ["--rsh", shlex.join(ssh(campaign))]
    if most_bytes is not None:
        limit = str(max(most_bytes, LEAST_LIMIT_BYTES))
        argv = [sys.executable, "-I", "-S", "-c", LIMITED, limit, str(os.getpid()), *argv]
    done = call([*argv, *words], over)
    if done.returncode == 0:
        return
    if done.returncode in (NO_ANSWER, CUT_OFF):
        raise Unreachable(f"{site.name}: rsync: {done.stderr}", "it goes on from there later")
    lines = [printable(line, SHOWN) for line in _lines(done.stderr)]
    lines, refused = lines or [f"exit code {done.returncode}"], _refusals(done.stderr)
    shown = dict.fromkeys(([*refused, lines[0]][0], lines[-1]))
    found = f"{site.name}: rsync stopped: {'; '.join(shown)}"
    codes = {done.returncode, *map(int, re.findall(r"\(code (\d+)\)", done.stderr))}
    if codes <= CONNECTION_CODES and not refused and TOO_LARGE not in done.stderr:
        raise Unreachable(found, "it goes on from there when it is tried again")
    raise UserError(found, f"mend it in {words[-1]}, then type the same line again")


def _refusals(text: str) -> list[str]:
    """The lines by which ssh, or a login shell, says that it will not, and not only now."""
    return [printable(line, SHOWN) for line in _lines(text) if REFUSED.search(line)]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
