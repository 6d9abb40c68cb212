"""Files to and from a facility: an rsync of RHEL 8 is enough, and its failures are told apart."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.campaign import transfer
from atoll.campaign.store import checked_campaign
from atoll.campaign.transfer import Unreachable, ask, fetch, home_of, send
from atoll.errors import UserError
from atoll.settings.exchange import read_answer
from atoll.settings.federation import Campaign

# ssh's options and its host dropped: what is asked for is done here
SSH = """#!/bin/sh
while [ "$1" != far ]; do shift; done
shift
exec sh -c "$*"
"""
# as 3.1.3 says of an option that came with 3.2.3
OLD_RSYNC = """#!/bin/sh
case "$*" in *--mkpath*) echo "rsync: --mkpath: unknown option" >&2; exit 1;; esac
exec {rsync} "$@"
"""
BROKEN_RSYNC = """#!/bin/sh
cat >&2 <<'END'
{lines}
END
exit {code}
"""
FULL = """\
rsync: [receiver] write failed on "/site/incoming/x": No space left on device (28)
rsync error: error in file IO (code 11) at receiver.c(380) [receiver=3.2.7]"""
DENIED = """\
rsync: [generator] recv_generator: mkdir "/site/incoming" failed: Permission denied (13)
rsync error: some files/attrs were not transferred (code 23) at main.c(1338) [sender=3.2.7]"""
CLOSED = """\
rsync: connection unexpectedly closed (0 bytes received so far) [sender]
rsync error: error in rsync protocol data stream (code 12) at io.c(232) [sender=3.2.7]"""
REFUSED = """\
ssh: connect to host far port 22: Connection refused
rsync: connection unexpectedly closed (0 bytes received so far) [sender]
rsync error: unexplained error (code 255) at io.c(232) [sender=3.2.7]"""
KEY_REFUSED = "me@far: Permission denied (publickey,keyboard-interactive)."
HOST_UNKNOWN = "No ED25519 host key is known for far.\nHost key verification failed."
HOST_CHANGED = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
NO_ANSWER = """\
[sender] io timeout after 300 seconds -- exiting
rsync error: timeout in data send/receive (code 30) at io.c(201) [sender=3.2.7]"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ahead of all others in PATH, with an ssh that goes nowhere."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder / "ssh", SSH)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def campaign(folder: Path, host: str | None) -> Campaign:
    site = {"name": "north", "host": host, "folder": str(folder / "north")}
    return checked_campaign({"name": "c", "sites": [site], "start": []})


def made(folder: Path) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("1 2 3")
    return folder / "model"


@pytest.mark.login_node
@pytest.mark.parametrize("host", [None, "far"])
def test_an_rsync_without_mkpath_makes_the_folders_above(
    programs: Path, tmp_path: Path, host: str | None
) -> None:
    which = next(p for p in ("/usr/bin/rsync", "/usr/local/bin/rsync") if Path(p).is_file())
    program(programs / "rsync", OLD_RSYNC.format(rsync=which))
    settings = campaign(tmp_path, host)
    target = tmp_path / "north" / "a b" / "incoming"
    send(settings, settings.sites[0], made(tmp_path), str(target))
    assert (target / "weights").read_text() == "1 2 3"
    fetch(settings, settings.sites[0], str(target), tmp_path / "back")
    assert (tmp_path / "back" / "weights").read_text() == "1 2 3"


@pytest.mark.parametrize(
    ("lines", "code", "found"),
    [
        (FULL, 11, "No space left on device.*code 11"),
        (FULL + "\n" + CLOSED, 12, "No space left on device.*code 12"),
        (DENIED, 23, "Permission denied.*code 23"),
        ("sh: 1: rsync: not found\n" + CLOSED, 12, "rsync: not found"),
        ("bash: rsync: command not found\n" + CLOSED, 127, "command not found"),
        ("Welcome\nme: disk quota exceeded, no login\n" + CLOSED, 12, "me: disk quota exceeded"),
        ("/usr/bin/rrsync error: not in /site\n" + CLOSED, 12, "rrsync error"),
        ("This account is currently not available.\n" + CLOSED, 12, "account is currently not"),
        (KEY_REFUSED + "\n" + REFUSED, 255, "Permission denied .publickey"),
        (HOST_CHANGED + "\n" + CLOSED, 255, "HOST IDENTIFICATION HAS CHANGED"),
        (HOST_UNKNOWN + "\n" + CLOSED, 255, "Host key verification failed"),
    ],
)
def test_what_a_facility_must_mend_is_no_failure_of_the_line(
    programs: Path, tmp_path: Path, lines: str, code: int, found: str
) -> None:
    program(programs / "rsync", BROKEN_RSYNC.format(lines=lines, code=code))
    settings = campaign(tmp_path, "far")
    with pytest.raises(UserError, match=f"north: rsync stopped: .*{found}") as error:
        send(settings, settings.sites[0], made(tmp_path), str(tmp_path / "there"))
    assert not isinstance(error.value, Unreachable)


def test_a_transfer_that_hangs_is_ended(programs: Path, tmp_path: Path) -> None:
    program(programs / "rsync", "#!/bin/sh\nsleep 60 & sleep 60\n")
    settings, ends = campaign(tmp_path, "far"), lambda quiet_seconds: quiet_seconds > 0.3
    [north] = settings.sites
    with pytest.raises(Unreachable, match="no answer in the time that it has"):
        send(settings, north, made(tmp_path), str(tmp_path / "there"), over=ends)
    with pytest.raises(Unreachable, match="no answer in the time that it has"):
        fetch(settings, north, "there", tmp_path / "here", over=ends)


def test_a_login_that_hangs_is_ended(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs / "ssh", "#!/bin/sh\nsleep 60 & sleep 60\n")
    monkeypatch.setattr(transfer, "SSH_SECONDS", 0.3)
    settings = campaign(tmp_path, "far")
    with pytest.raises(Unreachable, match="north does not answer"):
        home_of(settings, settings.sites[0])


@pytest.mark.parametrize("word", ["site", "send"])
@pytest.mark.parametrize("code", [1, 255])
def test_what_the_other_side_says_is_shown_escaped(
    programs: Path, tmp_path: Path, word: str, code: int
) -> None:
    """A terminal would obey it: of ssh, of rsync, and of what they start."""
    for name in ("ssh", "rsync"):
        program(programs / name, BROKEN_RSYNC.format(lines="\x1b]0;owned\x07\x1b[2J", code=code))
    settings = campaign(tmp_path, "far")
    with pytest.raises(UserError) as error:
        if word == "send":
            send(settings, settings.sites[0], made(tmp_path), str(tmp_path / "there"))
        else:
            ask(settings, settings.sites[0], ["site"])
    assert r"\x1b]0;owned" in error.value.found and "\x1b" not in error.value.found


def test_an_answer_is_shown_escaped() -> None:
    with pytest.raises(UserError) as error:
        read_answer("\x1b[2J welcome", "north")
    assert r"\x1b[2J" in error.value.found and "\x1b" not in error.value.found


@pytest.mark.parametrize(
    ("lines", "code"),
    [(CLOSED, 10), (CLOSED, 12), (NO_ANSWER, 30), (NO_ANSWER, 35), (REFUSED, 255)],
)
def test_a_line_that_is_down_is_tried_again(
    programs: Path, tmp_path: Path, lines: str, code: int
) -> None:
    program(programs / "rsync", BROKEN_RSYNC.format(lines=lines, code=code))
    settings = campaign(tmp_path, "far")
    with pytest.raises(Unreachable, match="north: rsync stopped"):
        send(settings, settings.sites[0], made(tmp_path), str(tmp_path / "there"))


@pytest.mark.login_node
def test_a_folder_that_cannot_be_made_is_no_failure_of_the_line(
    programs: Path, tmp_path: Path
) -> None:
    settings = campaign(tmp_path, "far")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"rsync stopped: mkdir: .*Not a directory") as error:
        send(settings, settings.sites[0], made(tmp_path), str(tmp_path / "file" / "there"))
    assert not isinstance(error.value, Unreachable)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (KEY_REFUSED, "Permission denied .publickey"),
        (HOST_UNKNOWN, "Host key verification failed"),
        ("Received disconnect from far: 2: Too many authentication failures", "Too many"),
        ("Unable to negotiate with far port 22: no matching host key type found.", "negotiate"),
    ],
)
def test_a_refusal_of_ssh_is_counted_and_named(
    programs: Path, tmp_path: Path, lines: str, found: str
) -> None:
    program(programs / "ssh", BROKEN_RSYNC.format(lines=lines, code=255))
    settings = campaign(tmp_path, "far")
    with pytest.raises(UserError, match=f"north refuses ssh: .*{found}") as error:
        ask(settings, settings.sites[0], ["site"])
    assert not isinstance(error.value, Unreachable) and "-- far true" in error.value.hint
    program(programs / "ssh", BROKEN_RSYNC.format(lines=REFUSED.splitlines()[0], code=255))
    with pytest.raises(Unreachable, match=r"north does not answer: .*Connection refused"):
        ask(settings, settings.sites[0], ["site"])


FETCH = """
import json, sys
from pathlib import Path
from atoll.campaign.store import checked_campaign
from atoll.campaign.transfer import fetch
campaign = checked_campaign(json.loads(sys.argv[1]))
fetch(campaign, campaign.sites[0], "there", Path(sys.argv[2]), ["a.safetensors"], 10)
"""


@pytest.mark.login_node
def test_what_comes_ends_with_whoever_asked_for_it(tmp_path: Path, programs: Path) -> None:
    """Else it would go on in the folder that the next coordinator takes."""
    begun = tmp_path / "begun"
    program(
        programs / "rsync",
        f"#!/bin/sh\necho $$ > {begun}.part; mv {begun}.part {begun}; exec sleep 300\n",
    )
    words = [campaign(tmp_path, "far").model_dump_json(), str(tmp_path / "here")]
    process = subprocess.Popen([sys.executable, "-c", FETCH, *words])
    await_that(begun.is_file)
    process.kill()
    process.wait()
    await_that(lambda: has_ended(int(begun.read_text())))


def await_that(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
