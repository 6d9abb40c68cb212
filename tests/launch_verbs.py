"""Verbs for the tests of the launcher, imported by the processes it starts."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.errors import UserError
from atoll.launch import Placement

# Where this module, and torch with it, was imported: a forked rank inherits it from its parent.
IMPORTED_BY = os.getpid()


def all_reduce(run_folder: Path, placement: Placement) -> None:
    """Sum (rank + 1) over all ranks and write down what this rank saw."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    seen = {
        "total": int(total),
        "placement": vars(placement),
        "group": [dist.get_rank(), dist.get_world_size()],
        "imported_by": IMPORTED_BY,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ["OMP_NUM_THREADS"],
        "openblas_num_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
    }
    dist.destroy_process_group()
    (run_folder / f"rank-{placement.rank}.json").write_text(json.dumps(seen))


def fail_on_rank_1(run_folder: Path, placement: Placement) -> int:
    """Rank 1 asks for exit code 7; the others would sleep for much longer than a test."""
    (run_folder / f"pid-{placement.rank}").write_text(str(os.getpid()))
    if placement.rank != 1:
        time.sleep(600)
    wait_for(run_folder, placement.world_size)
    return 7


def raise_user_error(run_folder: Path, placement: Placement) -> None:
    raise UserError(f"rank {placement.rank} found 3 apples", "give it 4")


def raise_error(run_folder: Path, placement: Placement) -> None:
    raise ValueError(f"rank {placement.rank} fell")


def finish_late(run_folder: Path, placement: Placement) -> None:
    """Return while a thread is still at work, as an asynchronous save may be."""
    print(f"printed by rank {placement.rank}")
    threading.Thread(target=_write_later, args=(run_folder / f"late-{placement.rank}",)).start()


def exit_on_sigusr2(run_folder: Path, placement: Placement) -> None:
    """Wait for SIGUSR2, then end with exit code 75 as a run that wants to go on later does."""
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(75))
    (run_folder / f"pid-{placement.rank}").write_text(str(os.getpid()))
    time.sleep(600)


def wait_for(run_folder: Path, count: int) -> None:
    while len(list(run_folder.glob("pid-*"))) < count:
        time.sleep(0.01)


def _write_later(path: Path) -> None:
    time.sleep(0.3)
    path.write_text("done")
