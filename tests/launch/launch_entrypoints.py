"""Commands for the tests of the launcher: ways in which a rank may end."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from atoll.errors import UserError
from atoll.launch import Placement

# Much longer than any test: whoever sleeps this long is ended by somebody else.
FOREVER = 600


def fail_on_rank_1(run_folder: Path, placement: Placement) -> int:
    """Rank 1 ends with exit code 7 once the others are asleep."""
    if placement.rank != 1:
        sleep_as(run_folder, placement)
    while len(list(run_folder.glob("pid-*"))) < placement.world_size - 1:
        time.sleep(0.01)
    return 7


def raise_user_error(run_folder: Path, placement: Placement) -> None:
    raise UserError(f"rank {placement.rank} found 3 apples", "give it 4")


def raise_error(run_folder: Path, placement: Placement) -> None:
    raise ValueError(f"rank {placement.rank} fell")


def finish_late(run_folder: Path, placement: Placement) -> None:
    """Return while a thread is still at work, as an asynchronous save may be."""
    # In one piece, line end included: two ranks write to one pipe.
    sys.stdout.write(f"printed by rank {placement.rank}\n")
    threading.Thread(target=write_later, args=(run_folder / f"late-{placement.rank}",)).start()


def write_later(path: Path) -> None:
    time.sleep(0.3)
    path.write_text("done")


def name_task_folder(run_folder: Path, placement: Placement) -> None:
    (run_folder / f"cache-{placement.rank}").write_text(os.environ["CACHE_DIR"])


def end_on_sigusr2(run_folder: Path, placement: Placement) -> None:
    """End with exit code 75 on SIGUSR2, as a run that wants to go on in another job."""
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(75))
    sleep_as(run_folder, placement)


def ignore_sigterm(run_folder: Path, placement: Placement) -> int:
    """Rank 1 ends with exit code 7; the others will not hear SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return fail_on_rank_1(run_folder, placement)


def sleep_as(run_folder: Path, placement: Placement) -> None:
    named = run_folder / f"naming-{placement.rank}"
    named.write_text(str(os.getpid()))
    named.rename(run_folder / f"pid-{placement.rank}")
    time.sleep(FOREVER)
