"""Stop in time: what one rank knows of a nearly ended job becomes a checkpoint of all, at one step.

The job's shell is warned by its scheduler and leaves a file, which the first rank looks for. A
rank also heeds the signals that reach it: USR2 ahead of the time limit, TERM when it is preempted
or cancelled.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from atoll import run_dir
from atoll.errors import UserError
from atoll.settings import Run
from atoll.sharding.process_group import World

TIME_IS_OVER, TERMINATED = run_dir.RESTART_CODE, 128 + signal.SIGTERM
CODES = {signal.SIGUSR2: TIME_IS_OVER, signal.SIGTERM: TERMINATED}

StopSignal = Callable[[], int]


@contextmanager
def stop_signals(run_folder: Path, rank: int) -> Iterator[StopSignal]:
    """A function that tells with which exit code this rank was asked to stop; 0: it was not."""
    codes: list[int] = []
    stop_file = run_dir.stop_file(run_folder)
    before = {number: signal.getsignal(number) for number in CODES}

    def asked() -> int:
        over = TIME_IS_OVER if rank == 0 and stop_file.exists() else 0
        return max([over, *codes])

    try:
        for number, code in CODES.items():
            signal.signal(number, lambda *_, code=code: codes.append(code))
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def agreement(world: World, asked: StopSignal) -> Iterator[StopSignal]:
    """A function that all ranks call after each step, and that gives all of them one answer.

    The ranks exchange what they know while the next step goes on, so that nobody waits: the
    answer is what was known one call ago.
    """
    if world.size == 1:
        yield asked
        return
    codes = torch.zeros(1, dtype=torch.int32)
    pending = dist.all_reduce(codes, dist.ReduceOp.MAX, async_op=True)

    def agreed() -> int:
        nonlocal codes, pending
        pending.wait()
        answer = int(codes.item())
        codes = torch.tensor([asked()], dtype=torch.int32)
        pending = dist.all_reduce(codes, dist.ReduceOp.MAX, async_op=True)
        return answer

    yield agreed
    pending.wait()


def note_restart(run: Run, run_folder: Path, step: int, steps_done: int) -> None:
    """Write down that the run was stopped at `step`, on one rank.

    Raises `UserError` where another job would be of no use: none of the time was enough for a
    step, or the run was restarted as often as allowed.
    """
    file = run_dir.restarts_file(run_folder)
    lines = file.read_text().splitlines() if file.exists() else []
    if steps_done == 0:
        raise UserError(
            f"the job's time was over before one step was done (step {step})",
            "give it more: facility.walltime_minutes, or a shorter restart.notice_seconds",
        )
    if len(lines) >= run.restart.max_restarts:
        raise UserError(
            f"the time was over once more at step {step}, after {len(lines)} restarts "
            f"(restart.max_restarts={run.restart.max_restarts})",
            "submit the same line again: the run goes on from there",
        )
    entry = {"step": step, "time": time.time(), "job": os.environ.get("SLURM_JOB_ID", "")}
    run_dir.write_whole(file, "\n".join([*lines, json.dumps(entry)]) + "\n")
    run_dir.write_whole(run_dir.restart_file(run_folder), "")
