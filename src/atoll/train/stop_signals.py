"""Stop in time: what one rank knows of a nearly ended job becomes a checkpoint of all, at one step.

The job's shell is warned by its scheduler and leaves a file, which the first rank looks for. A
rank also catches the signals that reach it: USR2 ahead of the time limit, TERM when it is preempted
or cancelled, INT for Ctrl-C.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll import run_dir
from atoll.errors import UserError
from atoll.health.restarts import add_restart, restarts
from atoll.settings import Run
from atoll.sharding import agreement
from atoll.sharding.process_group import World

TIME_IS_OVER, TERMINATED = run_dir.RESTART_CODE, 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
CODES = {
    signal.SIGUSR2: TIME_IS_OVER,
    signal.SIGTERM: TERMINATED,
    signal.SIGINT: INTERRUPTED,
}

StopCode = Callable[[], int]  # the exit code to stop with; 0: go on


@contextmanager
def stop_signals(run_folder: Path, rank: int) -> Iterator[StopCode]:
    """The exit code that signals and the stop file ask of this rank, as a function."""
    codes: list[int] = []
    stop_file = run_dir.stop_file(run_folder)
    before = {number: signal.getsignal(number) for number in CODES}

    def stop_code() -> int:
        is_over = False
        with suppress(OSError):  # a file system that does not answer now is asked again
            is_over = rank == 0 and stop_file.exists()
        return max([TIME_IS_OVER * is_over, *codes])

    def heard(number: int, _: object) -> None:
        if number == signal.SIGINT and INTERRUPTED in codes:
            raise KeyboardInterrupt  # typed again: at once
        codes.append(CODES[signal.Signals(number)])

    try:
        for number in CODES:
            signal.signal(number, heard)
        yield stop_code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exchanged_stop_code(world: World, stop_code: StopCode) -> StopCode:
    """A function for the end of a step: the highest code any rank had at its beginning.

    All ranks call both. The codes travel while the step goes on, so that nobody waits, and none is
    under way behind it: a profiler that stops while another thread records crashes the process.
    """
    if world.background is None:
        return stop_code
    code, tree = stop_code(), world.background.tree
    return world.background.start(lambda: agreement.highest(tree, code)).result


def note_restart(run: Run, run_folder: Path, step: int) -> None:
    """Write down that the run was stopped at `step`, on one rank.

    Raises `UserError` if the run was restarted as often as allowed.
    """
    earlier = restarts(run_folder)
    if len(earlier) >= run.restart.max_restarts:
        raise UserError(
            f"the time was over once more at step {step}, after {len(earlier)} restarts "
            f"(restart.max_restarts={run.restart.max_restarts})",
            "submit the same line again: the run goes on from there",
        )
    add_restart(run_folder, step=step, job=os.environ.get("SLURM_JOB_ID", ""))
    run_dir.write_whole(run_dir.restart_file(run_folder), "")
