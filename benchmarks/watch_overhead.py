"""What being watched costs: a rank's notes of a step, and a node's watcher.

    python benchmarks/watch_overhead.py [--rounds 5] [--seconds 10] [--check]

Both beside 1 % of what they are taken from: of a step of 10 ms, and of one core. The watcher looks
at eight ranks, as on a node of eight devices, which take a step every 10 ms.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results

from atoll.health import heartbeat
from atoll.health.watchdog import TICK_SECONDS, Watched

RANKS, STEP_SECONDS, SHARE = 8, 0.01, 0.01
PHASES: tuple[heartbeat.Phase, ...] = (
    "input",
    "compute",
    "checkpoint",
    "optimizer",
    "communication",
)


def notes(own: heartbeat.Heartbeat, steps: int = 1000) -> float:
    """Microseconds that the notes of a step take."""
    began = time.perf_counter()
    for number in range(steps):
        own.step(number)
        for phase in PHASES:
            own.at(phase)
    return (time.perf_counter() - began) / steps * 1e6


def take_steps(folder: Path, rank: int) -> None:
    own, number = heartbeat.begin(folder, rank), 0
    while True:
        number += 1
        own.step(number)
        time.sleep(STEP_SECONDS)


def watching(seconds: float) -> float:
    """Milliseconds of a core that a watcher takes in a second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "ranks"
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=take_steps, args=(folder, rank)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        watched = Watched(
            run_folder=name,
            records=str(Path(name) / "records"),
            folder=str(folder),
            node_rank=0,
            node_count=2,
            first_rank=0,
            ranks=RANKS,
            device="cuda",
            stall_seconds=None,
            slow_seconds=1800.0,
        )
        argv = [sys.executable, "-m", "atoll.health.watchdog", watched.in_words()]
        watcher = subprocess.Popen(argv)
        try:
            time.sleep(2 * TICK_SECONDS + 1)
            before = processor_seconds(watcher.pid)
            time.sleep(seconds)
            return (processor_seconds(watcher.pid) - before) / seconds * 1e3
        finally:
            watcher.kill()
            watcher.wait()
            for process in ranks:
                process.kill()
                process.join()


def processor_seconds(pid: int) -> float:
    words = heartbeat.process_words(pid)
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each look at the watcher")
    parser.add_argument("--check", action="store_true", help="fail beyond 1 %%")
    arguments = parser.parse_args()
    own = heartbeat.unwatched(0)
    noted = [notes(own) for _ in range(arguments.rounds)]
    watched = [watching(arguments.seconds) for _ in range(arguments.rounds)]
    of_step, of_core = [STEP_SECONDS * SHARE * 1e6], [SHARE * 1e3]
    rows = [
        results.row("a rank's notes of a step", "µs", noted, "1 % of 10 ms", of_step, "lower", 1.0),
        results.row(
            "the watcher of 8 ranks, a second",
            "ms",
            watched,
            "1 % of a core",
            of_core,
            "lower",
            1.0,
        ),
    ]
    return int(not results.record("watch_overhead", rows) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
