"""Waiting for tokens that the job prepares beside its ranks."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from atoll import run_dir
from atoll.errors import UserError

T = TypeVar("T")
Wait = Callable[[str], None]  # for what is missing: a moment; raises where nobody makes it
POLL_SECONDS = 0.5
SETTLE_SECONDS = 60.0  # so long a node's cache may hide what another one wrote
STARTING, RUNNING, FAILED = "starting", "running", "failed"  # of a preparation beside ranks


class TimeIsOver(UserError):
    """The job's time is nearly over, and what a rank waits for is still being prepared."""


def awaited(find: Callable[[], T | None], wait: Wait, missing: str) -> T:
    """What is found, once it is there; raises as `wait` does."""
    while (found := find()) is None:
        wait(missing)
    return found


def refuse_missing(missing: str) -> NoReturn:
    """A `Wait` where nobody prepares the text."""
    raise UserError(f"{missing} is missing", "run `atoll tokenize RUN_FOLDER`")


def waits_for_job(run_folder: Path, alive: Callable[[], None], log: Callable[[str], None]) -> Wait:
    """A `Wait` beside the job's own preparation, as long as that goes on.

    alive: called at each look; log: told of each thing that is waited for, once.
    """
    said, quiet_since = "", 0.0

    def wait(missing: str) -> None:
        nonlocal said, quiet_since
        state, now = preparation_state(run_folder), time.monotonic()
        if state == FAILED:
            raise UserError(
                f"{missing} is missing, and its preparation failed",
                f"mend what `atoll tokenize {run_folder}` says, and submit the same line again",
            )
        if run_dir.stop_file(run_folder).exists():
            raise TimeIsOver(
                f"the time of the job is nearly over, and {missing} is still being prepared",
                "submit the same line again: preparation goes on with what is whole",
            )
        if missing != said:
            log(f"waiting for {missing}: it is being prepared …")
            said, quiet_since = missing, now
        if state is not None:
            quiet_since = now
        elif now - quiet_since > SETTLE_SECONDS:
            refuse_missing(missing)
        alive()
        time.sleep(POLL_SECONDS)

    return wait


def wait_for_plan(run_folder: Path, wait: Wait) -> None:
    """Until the job's preparation says that the plans it leaves are of this run's texts."""
    awaited(lambda: preparation_state(run_folder) != STARTING or None, wait, "the plan of tokens")


def preparation_state(run_folder: Path) -> str | None:
    """What job.sh wrote of the preparation beside the ranks; None: there is none."""
    try:
        return run_dir.preparing_file(run_folder).read_text().strip()
    except FileNotFoundError:
        return None
