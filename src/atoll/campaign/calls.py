"""A command whose end and whose output are in the hands of others."""

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence

from atoll.commands import MISSING, Finished
from atoll.settings.exchange import MAX_ANSWER_BYTES

LOOK_SECONDS = 0.2
NO_ANSWER = -124  # we ended it; a program's own 124, as of timeout(1), is another matter
CUT_OFF = -125  # the same, and it had given a sign of life just before
QUIET_SECONDS = 30.0  # without a sign of life; a facility gives one every few
FLOODED = 1
TAIL_BYTES = 1 << 16  # of what is said of errors, the end
PIECE = 1 << 16
Over = Callable[[float], bool]  # after so many seconds without a word: does nobody wait any more


def never(quiet_seconds: float) -> bool:
    return False


def call(argv: Sequence[str], over: Over = never, most_bytes: int = MAX_ANSWER_BYTES) -> Finished:
    """Run a command until it ends, says too much, or `over` says that nobody waits any longer.

    Those that it started itself may go on, and hold its pipes: it is over when it has ended.
    """
    try:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return Finished(MISSING, "", f"cannot start {argv[0]}: {error.strerror}")
    assert process.stdout is not None and process.stderr is not None
    output, errors, heard = bytearray(), bytearray(), time.monotonic()
    try:
        with selectors.DefaultSelector() as pipes, process.stdout, process.stderr:
            pipes.register(process.stdout, selectors.EVENT_READ, output)
            pipes.register(process.stderr, selectors.EVENT_READ, errors)
            while pipes.get_map():
                ended = process.poll() is not None
                ready = pipes.select(0 if ended else LOOK_SECONDS)
                if ended and not ready:
                    break
                for key, _ in ready:
                    piece = os.read(key.fd, PIECE)
                    key.data.extend(piece)
                    heard = time.monotonic()
                    if not piece:
                        pipes.unregister(key.fileobj)
                del errors[:-TAIL_BYTES]
                if len(output) > most_bytes:
                    return Finished(FLOODED, "", f"it printed more than {most_bytes:,} bytes")
                quiet_seconds = time.monotonic() - heard
                if over(quiet_seconds):
                    is_alive = quiet_seconds < QUIET_SECONDS and bool(output or errors)
                    code = CUT_OFF if is_alive else NO_ANSWER
                    return Finished(code, "", "no answer in the time that it has")
        code = _ended(process, heard, over)
        return Finished(code, output.decode(errors="replace"), errors.decode(errors="replace"))
    finally:
        process.kill()
        process.wait()


def _ended(process: subprocess.Popen[bytes], heard: float, over: Over) -> int:
    """The exit code of a process that says nothing any more."""
    while not over(time.monotonic() - heard):
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return NO_ANSWER
