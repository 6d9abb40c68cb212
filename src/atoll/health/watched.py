"""A rank's side of being watched: its record, and its stack and collectives when asked for."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll import run_dir
from atoll.errors import UserError
from atoll.health import heartbeat, recorder
from atoll.health.heartbeat import Heartbeat, is_watched, watcher_file
from atoll.health.node_record import start_of
from atoll.health.watchdog import (
    ANSWER_SIGNAL,
    PATIENCE_SECONDS,
    Watched,
    answer_file,
    judged_file,
    question_file,
    stack_file,
)
from atoll.launch import Placement
from atoll.settings import Run
from atoll.sharding.process_group import SharedError

POLL_SECONDS = 0.05
WATCHER_START_SECONDS = 5.0
MOST_CALLS = 40


@contextmanager
def watched_rank(run: Run, run_folder: Path, placement: Placement) -> Iterator[Heartbeat]:
    """Be watched for the length of a `with`; the first rank of a node starts its watcher."""
    lease, faults = run_dir.lease_folder(run_folder), run_dir.faults_file(run_folder)
    start = start_of(lease, faults, placement.master_port)
    folder = heartbeat.node_folder(run_folder, start, placement.node_rank)
    with answering(folder, placement.rank) as own:
        if placement.local_rank == 0:
            start_watcher(watched(run, run_folder, placement, start, folder))
        try:
            with last_words(own, placement):
                yield own
        except Exception as error:
            if all_know(error, placement):
                own.ended(2)
            raise
        except BaseException:
            own.ended(128 + signal.SIGINT)
            raise
        own.ended(0)


@contextmanager
def last_words(own: Heartbeat, placement: Placement) -> Iterator[None]:
    """Keep what ends this rank in its record, and wait until the fault is judged.

    Within that of the process group: once a rank closes its connections, the others fail as well.
    """
    try:
        yield
    except Exception as error:
        if not all_know(error, placement) and not own.has_failed:
            own.failed(described(error))
            wait_for_judge(own.folder)
        raise


def all_know(error: Exception, placement: Placement) -> bool:
    """Whether it is a user's mistake that every rank ends by, of itself: no fault."""
    alone = placement.world_size == 1
    return isinstance(error, UserError if alone else SharedError)


@contextmanager
def answering(folder: Path, rank: int) -> Iterator[Heartbeat]:
    """This rank's record, and what answers for it: a signal its stack, a thread its collectives."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    question = question_file(folder, rank)
    question.unlink(missing_ok=True)
    os.mkfifo(question, 0o600)
    was_enabled = faulthandler.is_enabled()
    with open(stack_file(folder, rank), "w") as stack:
        # of this thread alone: the others run on meanwhile, and walking their calls can crash
        faulthandler.register(ANSWER_SIGNAL, file=stack, all_threads=False)
        if not was_enabled:
            faulthandler.enable(stack)
        threading.Thread(target=answer, args=(folder, rank), daemon=True).start()
        try:
            yield heartbeat.begin(folder, rank)
        finally:
            faulthandler.unregister(ANSWER_SIGNAL)
            if not was_enabled:
                faulthandler.disable()


def answer(folder: Path, rank: int) -> None:
    """Write this rank's collectives down when the watcher opens the pipe, however often it does."""
    question, file = question_file(folder, rank), answer_file(folder, rank)
    while True:
        try:
            with open(question) as pipe:
                pipe.read()
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(recorder.collectives()))
            os.replace(partial, file)
        except OSError:
            return  # the watcher ended, and took its folder along


def watched(run: Run, run_folder: Path, placement: Placement, start: str, folder: Path) -> Watched:
    """What the watcher of this rank's node has to know."""
    return Watched(
        run_folder=str(run_folder),
        records=str(run_dir.node_records(run_folder) / start),
        folder=str(folder),
        node_rank=placement.node_rank,
        node_count=placement.node_count,
        first_rank=placement.rank,
        ranks=placement.local_world_size,
        device=run.facility.node.device,
        stall_seconds=run.watch.stall_seconds,
        slow_seconds=run.watch.slow_seconds,
    )


def start_watcher(watched: Watched) -> None:
    """A process of its own, in a session of its own: what stops or kills ranks does not meet it."""
    watcher_file(Path(watched.folder)).unlink(missing_ok=True)
    argv = [sys.executable, "-m", "atoll.health.watchdog", watched.in_words()]
    os.posix_spawn(sys.executable, argv, os.environ, setsid=True)


def described(error: Exception) -> str:
    """An error's type and words in a line, then its calls, a line each, the innermost last."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)[-MOST_CALLS:]
    calls = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return "\n".join([words, *calls])


def wait_for_judge(folder: Path) -> None:
    """Until the fault is judged, or nobody is there to do so."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < PATIENCE_SECONDS:
        if judged_file(folder).exists():
            return
        if not is_watched(folder) and waited > WATCHER_START_SECONDS:
            return
        time.sleep(POLL_SECONDS)
