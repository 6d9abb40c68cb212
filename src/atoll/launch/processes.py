"""Child processes of one node: started by fork, watched until the last one ends."""

import atexit
import ctypes
import itertools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NoReturn

from atoll.errors import UserError

# What a scheduler or a terminal sends to the launcher is meant for its ranks.
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
# After a rank failed, the others get this long to end by themselves (to finish a checkpoint, to
# print their own error), and once more between SIGTERM and SIGKILL.
GRACE_SECONDS = 5.0

_PR_SET_PDEATHSIG = 1


def run_processes(works: Sequence[Callable[[], int]]) -> int:
    """Run each piece of work in a forked child; return the first exit code that is not 0, or 0.

    When one fails the others end too, after a grace period. SIGTERM, SIGUSR2 and SIGINT reach the
    children instead of this process. A child killed by signal n counts as exit code 128 + n.
    """
    # Blocked signals wait until _watch takes them: none is lost, and no handler interrupts a fork.
    awaited: set[int] = {*FORWARDED_SIGNALS, signal.SIGCHLD}
    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        running = {_start(work, signal_mask) for work in works}
        return _watch(running, awaited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)


def _watch(running: set[int], awaited: set[int]) -> int:
    exit_code, deadline = 0, math.inf
    escalation = itertools.chain([signal.SIGTERM], itertools.repeat(signal.SIGKILL))
    while running:
        signal_number = _next_signal(awaited, deadline)
        if signal_number is None:
            _send(running, next(escalation))
            deadline = time.monotonic() + GRACE_SECONDS
        elif signal_number != signal.SIGCHLD:
            _send(running, signal_number)
        elif (failed := _reap(running)) and not exit_code:
            exit_code, deadline = failed, time.monotonic() + GRACE_SECONDS
    return exit_code


def _next_signal(awaited: set[int], deadline: float) -> int | None:
    if deadline == math.inf:
        return signal.sigwaitinfo(awaited).si_signo
    received = signal.sigtimedwait(awaited, max(0.0, deadline - time.monotonic()))
    return received.si_signo if received else None


def _reap(running: set[int]) -> int:
    """Take the children that ended out of `running`; return a failing exit code, or 0.

    Of several one that a child chose itself, before that of a signal.
    """
    exit_codes = []
    for pid in sorted(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            exit_codes.append(code if code >= 0 else 128 - code)
    return min((code for code in exit_codes if code), default=0)


def _send(running: set[int], signal_number: int) -> None:
    # A child is killed with all that it started; any other signal is for the rank itself.
    kill = os.killpg if signal_number == signal.SIGKILL else os.kill
    for pid in running:
        with suppress(ProcessLookupError):
            kill(pid, signal_number)


def _start(work: Callable[[], int], signal_mask: Iterable[int]) -> int:
    launcher = os.getpid()
    # What is still buffered would be written by parent and child.
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(work, launcher, signal_mask)
    return pid


def _be_child(work: Callable[[], int], launcher: int, signal_mask: Iterable[int]) -> NoReturn:
    exit_code = 1
    try:
        # A process group of its own: Ctrl-C comes once, forwarded, not from the terminal as well.
        os.setpgid(0, 0)
        die_with(launcher)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        exit_code = work()
        # As at the end of any interpreter, but without taking the modules down one by one.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        exit_code = _report(error)
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _report(error: BaseException) -> int:
    """Print what ended a child, as the interpreter would; return its exit code."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    if isinstance(error, UserError):
        # In one piece: the other ranks write to the same place.
        sys.stderr.write(error.shown())
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT  # who typed Ctrl-C knows
    traceback.print_exception(error)
    return 1


def die_with(launcher: int) -> None:
    """Have the kernel end this process when the launcher is gone, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
