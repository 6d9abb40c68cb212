"""Wait for a command, and pass on to it the signals that a scheduler sends to the job's process."""

import signal
import subprocess
from collections.abc import Sequence

FROM_SCHEDULER = (signal.SIGUSR2, signal.SIGTERM)


def run_to_its_end(command: Sequence[str]) -> int:
    """Run a command; its exit code, 128 and the signal's number where one ended it.

    Ctrl-C reaches the command itself: it ends as it sees fit, and so do we. Whoever was told to
    end does not go on behind a command that ended well all the same.
    """
    heard: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        heard.append(number)
        if process is not None:
            process.send_signal(number)

    handlers = dict.fromkeys(FROM_SCHEDULER, pass_on) | {signal.SIGINT: lambda *_: None}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        process = subprocess.Popen(command)
        for number in [*heard]:  # before it had begun
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == 0 and signal.SIGTERM in heard:
        return 128 + signal.SIGTERM
    return 128 - code if code < 0 else code
