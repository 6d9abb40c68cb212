"""How long until the first collective: torchrun against `atoll launch`, whole processes.

    python benchmarks/launch_to_first_collective.py [--rounds 5] [--check]

Every rank, on either side, runs `first_collective.py`: it imports torch and transformers, joins a
gloo group and sums one number over all ranks. The ratio is that of the seconds of whole commands,
from start to end, and until the last rank held the sum, and of the processor time of all
processes together.
torchrun has OMP_NUM_THREADS set and its static rendezvous, which was the fastest of its three, and
runs in turns with us. `--check` fails where a target is missed.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import results

WORKER = Path(__file__).resolve().with_name("first_collective.py")


class Case(NamedTuple):
    """One comparison: the launcher and its option, the ranks, the ratio to reach."""

    launcher: str
    option: str
    rank_count: int
    target_ratio: float


class Timing(NamedTuple):
    """Seconds: until the last rank had its sum, until it all ended, on all processors together."""

    reduced: Any
    ended: Any
    cpu: Any


WORDS = {"reduced": "to the first sum", "ended": "to the end", "cpu": "processor time"}


CASES = (
    Case("static", "--local-ranks", 2, 0.5),
    Case("static_node", "--fork", 8, 0.35),
)


def torchrun_command(rank_count: int, port: int, folder: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={rank_count}"]
    address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [*launcher, *address, str(WORKER), str(folder)]


def atoll_command(case: Case, folder: Path) -> list[str]:
    launcher = [sys.executable, "-m", "atoll", "launch", case.option, str(case.rank_count)]
    return [*launcher, str(folder), f"{WORKER.stem}:main"]


def timed(command: list[str], folder: Path, rank_count: int) -> Timing:
    """Run a command to its end. Raises where it failed or a rank did not get its sum."""
    paths = [str(WORKER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = max(1, len(os.sched_getaffinity(0)) // rank_count)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
    }
    cpu_before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    start = time.time()
    subprocess.run(command, env=environment, check=True)
    ended = time.time() - start
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - cpu_before
    reduced = [float(path.read_text()) for path in folder.glob("reduced-*")]
    if len(reduced) != rank_count:
        raise RuntimeError(f"{len(reduced)} of {rank_count} ranks wrote their time: {command}")
    return Timing(max(reduced) - start, ended, cpu)


def turn(command: Callable[[Path], list[str]], rank_count: int) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        return timed(command(Path(folder)), Path(folder), rank_count)


def measured(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Rows of one case over all rounds."""
    ports = count(29400)
    ways = {
        "ours": lambda: turn(lambda folder: atoll_command(case, folder), case.rank_count),
        "torchrun": lambda: turn(
            lambda folder: torchrun_command(case.rank_count, next(ports), folder), case.rank_count
        ),
    }
    results.in_turns(ways, 1)  # reads the files from disk once, for both
    ours, peer = results.in_turns(ways, rounds).values()
    targets = Timing(reduced=None, ended=case.target_ratio, cpu=None)
    title = f"{case.launcher}, {case.rank_count} ranks"
    return [
        results.row(
            f"{title}: {WORDS[name]}",
            "s",
            [getattr(timing, name) for timing in ours],
            "torchrun",
            [getattr(timing, name) for timing in peer],
            "lower",
            getattr(targets, name),
        )
        for name in Timing._fields
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    arguments = parser.parse_args()
    rows = [row for case in CASES for row in measured(case, arguments.rounds)]
    met = results.record("launch_to_first_collective", rows)
    return int(arguments.check and not met)


if __name__ == "__main__":
    sys.exit(main())
