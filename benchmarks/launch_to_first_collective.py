"""How long until the first collective: torchrun against `atoll launch`, whole processes.

    python benchmarks/launch_to_first_collective.py [--rounds 5] [--check]

Every rank, on either side, runs `first_collective.py`: it imports torch and transformers, joins a
gloo group and sums one number over all ranks. The ratio is that of the seconds of whole commands,
from start to end; `reduced` is when the last rank held the sum, `cpu` the processor time of all
processes together. Other work on the machine spoils the ratio: look at the load it prints.
torchrun has OMP_NUM_THREADS set and its static rendezvous, which was the fastest of its three, and
runs in turns with us. `--check` fails where a target is missed.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WORKER = Path(__file__).resolve().with_name("first_collective.py")


class Case(NamedTuple):
    """One comparison: the launcher and its option, the ranks, the ratio to reach."""

    launcher: str
    option: str
    rank_count: int
    target_ratio: float


class Timing(NamedTuple):
    """Seconds: until the last rank had its sum, until it all ended, on all processors together."""

    reduced: float
    ended: float
    cpu: float


CASES = (
    Case("static", "--local-ranks", 2, 0.6),
    Case("static_node", "--fork", 8, 0.4),
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


def one_round(case: Case, port: int) -> tuple[Timing, Timing]:
    """Time torchrun, then us."""
    with tempfile.TemporaryDirectory() as peer, tempfile.TemporaryDirectory() as ours:
        command = torchrun_command(case.rank_count, port, Path(peer))
        peer_timing = timed(command, Path(peer), case.rank_count)
        command = atoll_command(case, Path(ours))
        return peer_timing, timed(command, Path(ours), case.rank_count)


def measured(case: Case, round_count: int) -> tuple[str, bool]:
    """Compare one case over all rounds: a line of the table, and whether the target is met."""
    one_round(case, 29400)  # reads the files from disk once, for both
    rounds = [one_round(case, 29401 + number) for number in range(round_count)]
    peer, ours = (medians([pair[side] for pair in rounds]) for side in (0, 1))
    ratio = ours.ended / peer.ended
    seconds = "".join(f"{number:9.2f}" for number in (*peer, *ours))
    line = f"{case.launcher:12}{case.rank_count:5}{seconds}{ratio:9.2f}{case.target_ratio:9.2f}"
    return line, ratio <= case.target_ratio


def medians(timings: list[Timing]) -> Timing:
    return Timing(*(statistics.median(numbers) for numbers in zip(*timings, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    arguments = parser.parse_args()
    print(
        f"median seconds of {arguments.rounds} rounds on {len(os.sched_getaffinity(0))} cores, "
        f"load {os.getloadavg()[0]:.1f} at the start"
    )
    columns = "".join(f"{name:>9}" for name in ("reduced", "ended", "cpu"))
    print(f"{'':17}{'torchrun':>27}{'atoll':>27}")
    print(f"{'launcher':12}{'ranks':>5}{columns}{columns}{'ratio':>9}{'target':>9}")
    met = True
    for case in CASES:
        line, reached = measured(case, arguments.rounds)
        print(line, flush=True)
        met = met and reached
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
