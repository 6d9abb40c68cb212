"""A command for the tests of the watchdog: train, and let one rank go wrong in one step."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atoll.errors import UserError
from atoll.health.heartbeat import watcher_file
from atoll.launch import Placement
from atoll.train import checkpoint, evaluate, loop, train

FOREVER = 600.0  # much longer than any test


def main(run_folder: Path, placement: Placement) -> int:
    """Train; FAULT is KIND:STEP:RANK,RANK…"""
    kind, step, ranks = os.environ["FAULT"].split(":")
    if str(placement.rank) in ranks.split(","):
        FAULTS[kind](int(step))
    return train.main(run_folder, placement)


def run_rank(run_folder: Path, fault: str, placement: Placement, stderr: Path) -> None:
    """One rank in a process of its own, as a launcher starts it; the node is called n0, n1, …"""
    os.setpgid(0, 0)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    os.environ |= placement.environment()
    os.environ |= {"FAULT": fault, "SLURMD_NODENAME": f"n{placement.node_rank}"}
    torch.set_num_threads(1)
    try:
        sys.exit(main(run_folder, placement))
    except UserError as error:
        sys.stderr.write(error.shown())
        sys.exit(2)


def in_step(step: int, do: Any) -> None:
    original = loop.train_step

    def train_step(train_state: Any, batches: Any, number: int, *rest: Any) -> Any:
        if number == step:
            do(train_state)
        return original(train_state, batches, number, *rest)

    loop.train_step = train_step


def send(number: int) -> Any:
    return lambda step: in_step(step, lambda _: os.kill(os.getpid(), number))


def error(step: int) -> None:
    def fall(_: Any) -> None:
        raise ValueError("3 apples are missing")

    in_step(step, fall)


def slow_input(step: int) -> None:
    """The loader of batches does not come back."""
    original = loop.remaining_batches

    class Slow:
        def __init__(self, inner: Any) -> None:
            self.inner, self.taken = inner, 0

        def __enter__(self) -> Any:
            return iter(self.next_share, None)

        def next_share(self) -> Any:
            self.shares = getattr(self, "shares", None) or self.inner.__enter__()
            self.taken += 1
            if self.taken == step:
                time.sleep(FOREVER)
            return next(self.shares)

        def __exit__(self, *error: Any) -> Any:
            return self.inner.__exit__(*error)

    loop.remaining_batches = lambda *args: Slow(original(*args))


def never_enters(step: int) -> None:
    """A rank that computes on while the others exchange gradients."""
    in_step(step, lambda _: time.sleep(FOREVER))


def another_collective(step: int) -> None:
    in_step(step, lambda _: dist.barrier())


def mistake(step: int) -> None:
    """What every rank finds wrong by itself before the first step."""

    def refuse(*_: Any) -> None:
        raise UserError("4 apples for 3 ranks", "take 3")

    train.check_transport = refuse


def slow_phases(step: int) -> None:
    """Nothing is wrong: an evaluation and a checkpoint take long."""
    shares, prepare = evaluate.shares, checkpoint._prepare

    def slowly(original: Any, which: int) -> Any:
        calls = itertools.count(1)

        def call(*args: Any) -> Any:
            time.sleep(4.5 if next(calls) == which else 0)
            return original(*args)

        return call

    # the first evaluation is before the first step, where all may be slow
    evaluate.shares, checkpoint._prepare = slowly(shares, 2), slowly(prepare, 1)


def node_down(step: int) -> None:
    """The watcher and this rank are gone at once."""

    def fall(train_state: Any) -> None:
        watcher = watcher_file(train_state.heartbeat.folder).read_text().split()[0]
        pids = [int(watcher), os.getpid()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    in_step(step, fall)


FAULTS = {
    "stop": send(signal.SIGSTOP),
    "kill": send(signal.SIGKILL),
    "crash": send(signal.SIGSEGV),
    "node": node_down,
    "error": error,
    "input": slow_input,
    "absent": never_enters,
    "other": another_collective,
    "mistake": mistake,
    "slow": slow_phases,
    "none": lambda step: None,
}
