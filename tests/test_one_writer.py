"""Two processes that make the same folder, of which the first was left behind by a kill."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import made_up
import pytest

from atoll.__main__ import main
from atoll.federation import aggregate_command
from atoll.one_writer import one_writer

LEFT_BEHIND = """
import sys, time
from pathlib import Path
from atoll.one_writer import one_writer
with one_writer(Path(sys.argv[1])):
    print("has it", flush=True)
    sys.stdin.read()
"""


def left_behind(out: Path) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-c", LEFT_BEHIND, str(out)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "has it\n"
    return process


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_who_was_left_behind_is_waited_for(tmp_path: Path, how: str) -> None:
    """An aggregation goes on when its coordinator is killed, and the next one makes the same."""
    made_up.first(tmp_path)
    delta = made_up.weights(1, 1e-3)
    update = made_up.update(tmp_path, tmp_path / "global-0", "north", delta, "int8", round=1).folder
    out, ended = tmp_path / "global-1", threading.Event()
    process = left_behind(out)

    def again() -> None:
        words = [str(update), "--base", str(tmp_path / "global-0"), "--out", str(out)]
        assert aggregate_command.main(words) == 0
        ended.set()

    beside = threading.Thread(target=again)
    beside.start()
    assert not ended.wait(1.0) and not out.exists()
    if how == "ends":
        process.communicate("")
    else:
        process.kill()
        process.communicate()
    beside.join(60)
    assert ended.is_set() and (out / "manifest.json").is_file() and (out / "master").is_dir()
    assert not list(tmp_path.glob(".global-1*")), "no lock stays"


def test_where_there_are_no_locks_the_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on Lustre that is mounted without flock."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert main(["apply-delta", str(tmp_path), str(tmp_path / "out")]) == 2
    found, hint = capsys.readouterr().err.splitlines()
    assert str(tmp_path / ".out.lock") in found and "has no locks" in hint


def test_of_many_one_is_at_it(tmp_path: Path) -> None:
    """Also where the lock was removed while others waited for it."""
    at_it, most = [0], [0]

    def work() -> None:
        for _ in range(20):
            with one_writer(tmp_path / "out"):
                at_it[0] += 1
                most[0] = max(most[0], at_it[0])
                time.sleep(0.0005)
                at_it[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and not os.listdir(tmp_path)
