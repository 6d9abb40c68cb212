"""A rank answers what it is at, however often it is asked, and lives on."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from atoll.health.watchdog import ANSWER_SIGNAL, answer_file, question_file, stack_file

QUESTIONS = 4000
RANK = """
import sys, time
from pathlib import Path
from atoll.health.watched import answering
with answering(Path(sys.argv[1]), 0):
    print("up", flush=True)
    while True:
        time.sleep(0.05)
"""


def test_a_rank_that_is_asked_for_its_stack_lives_on(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", RANK, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
        for _ in range(QUESTIONS):
            os.kill(rank.pid, ANSWER_SIGNAL)
            ask_for_collectives(question_file(tmp_path, 0))
            time.sleep(0.0003)
        assert rank.poll() is None
        rank.kill()
    assert rank.returncode == -signal.SIGKILL
    assert answer_file(tmp_path, 0).exists()
    assert 'File "<string>", line 8 in <module>' in stack_file(tmp_path, 0).read_text()


def ask_for_collectives(question: Path) -> None:
    with suppress(OSError):  # it is still at the last one
        os.close(os.open(question, os.O_WRONLY | os.O_NONBLOCK))
