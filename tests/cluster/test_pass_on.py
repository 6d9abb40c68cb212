"""A process that waits for a run in its place passes the scheduler's signals on."""

import os
import signal
import subprocess
import sys
import time

import pytest

WAITS = "import sys; from atoll.cluster.pass_on import run_to_its_end as run; "
WAITS += "sys.exit(run(['bash', '-c', sys.argv[1]]))"
HEARS = "trap 'exit 7' USR2; trap 'exit 8' TERM; trap 'exit 130' INT; : > {there}; "
HEARS += "while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR2, 7), (signal.SIGTERM, 8), (signal.SIGINT, 130)]
)
def test_a_command_hears_what_its_job_is_told(number, code, tmp_path):
    there = tmp_path / "there"
    words = [sys.executable, "-c", WAITS, HEARS.format(there=there)]
    process = subprocess.Popen(words, start_new_session=True)
    deadline = time.monotonic() + 30
    while not there.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if number == signal.SIGINT:  # typed: all processes of the terminal hear it
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(timeout=30) == code


def test_nothing_follows_what_was_told_to_end_and_ended_well(tmp_path):
    there = tmp_path / "there"
    text = f"trap 'exit 0' TERM; : > {there}; while :; do sleep 0.05; done"
    process = subprocess.Popen([sys.executable, "-c", WAITS, text])
    deadline = time.monotonic() + 30
    while not there.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=30) == 143


@pytest.mark.parametrize(("text", "code"), [("exit 3", 3), ("kill -KILL $$", 137)])
def test_how_a_command_ended_is_told(text, code):
    assert subprocess.run([sys.executable, "-c", WAITS, text]).returncode == code
