"""The observers of a run, opened before its first step and closed however it ends."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from atoll.monitor import loggers, metrics_file
from atoll.monitor.comm_profile import CommunicationProfile
from atoll.monitor.energy import EnergyCounter
from atoll.monitor.ledger import Ledger
from atoll.monitor.metrics import Metrics
from atoll.monitor.observers import Observers, Record, WatchedRun, Write
from atoll.monitor.progress import Progress
from atoll.monitor.slow_ranks import slow_ranks
from atoll.sharding.process_group import disk_error, run_on_all_ranks


@contextmanager
def watching(watched: WatchedRun) -> Iterator[Observers]:
    """The observers that `monitor` asks for, in the order in which they are called.

    Raises `UserError` for a logger that cannot be opened.
    """
    chosen, world = watched.run.monitor, watched.world
    with ExitStack() as stack:
        progress = None
        if chosen.progress and world.rank == 0:
            progress = Progress(watched.total_steps, watched.resumed_step)
            stack.callback(progress.on_end)
        writer = writing(watched, progress)
        write = run_on_all_ranks(world, lambda: stack.enter_context(writer))
        profile = CommunicationProfile(watched, write) if chosen.communication else None
        energy = EnergyCounter(watched, write, stack) if chosen.energy else None
        ledger = Ledger(watched)
        stack.push(ledger.close)
        slow = stack.enter_context(slow_ranks(watched, write))
        # the metrics of a step include what its profile found
        observers = (profile, slow, Metrics(watched, write, profile), energy, progress, ledger)
        if watched.preflight is not None:
            write({"event": "preflight", "step": watched.resumed_step, **watched.preflight})
        yield tuple(observer for observer in observers if observer is not None)


@contextmanager
def writing(watched: WatchedRun, progress: Progress | None) -> Iterator[Write]:
    """What writes a record: to metrics.jsonl first, then to the loggers and on the screen."""
    if watched.world.rank != 0:
        yield loggers.ignore
        return
    folder, step = watched.run_folder, watched.resumed_step
    metrics_file.begin(folder, step)
    start = loggers.Start(watched.run, folder, step)
    opened = loggers.opened(start) if watched.run.loggers else nullcontext(loggers.ignore)
    with opened as log:

        def write(record: Record) -> None:
            try:
                metrics_file.append(folder, record)
            except OSError as error:
                raise disk_error(error) from error
            log(record)
            if progress is not None:
                progress.show(record)

        yield write
