"""How long until the first collective: torchrun against `atoll launch`, whole processes.

    python benchmarks/launch_to_first_collective.py [--rounds 5] [--check]

Every rank, on either side, runs `first_collective` below: it imports torch and transformers, joins
a gloo group and sums one number over all ranks. The time is that of the whole command, from its
start to its end; the columns `reduced` give the time until the last rank held the sum.
torchrun has OMP_NUM_THREADS set, is started without `--standalone` (its static rendezvous on one
node was the faster one), and runs in turns with us. `--check` fails where a target is missed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """One comparison: the launcher and its option, the ranks, the ratio to reach."""

    launcher: str
    option: str
    rank_count: int
    target_ratio: float


class Timing(NamedTuple):
    """Seconds since the command's start: when the last rank had its sum, when it all ended."""

    reduced: float
    ended: float


CASES = (
    Case("static", "--local-ranks", 2, 0.6),
    Case("static_node", "--fork", 8, 0.4),
)


def first_collective(run_folder: Path, placement: object = None) -> int:
    """Import what a trainer imports, sum one number over all ranks, write down the time."""
    import torch
    import torch.distributed as dist
    import transformers

    assert transformers.__version__
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    (run_folder / f"reduced-{dist.get_rank()}").write_text(repr(time.time()))
    dist.destroy_process_group()
    return 0 if int(ones) == int(os.environ["WORLD_SIZE"]) else 1


def torchrun_command(rank_count: int, port: int, folder: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={rank_count}"]
    address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [*launcher, *address, __file__, "--rank-of", str(folder)]


def atoll_command(case: Case, folder: Path) -> list[str]:
    verb = f"{Path(__file__).stem}:first_collective"
    launcher = [sys.executable, "-m", "atoll", "launch", case.option, str(case.rank_count)]
    return [*launcher, str(folder), verb]


def timed(command: list[str], folder: Path, rank_count: int) -> Timing:
    """Run a command to its end. Raises where it failed or a rank did not get its sum."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = max(1, len(os.sched_getaffinity(0)) // rank_count)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
    }
    start = time.time()
    subprocess.run(command, env=environment, check=True)
    ended = time.time() - start
    reduced = [float(path.read_text()) for path in folder.glob("reduced-*")]
    if len(reduced) != rank_count:
        raise RuntimeError(f"{len(reduced)} of {rank_count} ranks wrote their time: {command}")
    return Timing(max(reduced) - start, ended)


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
    peer, ours = ([pair[side] for pair in rounds] for side in (0, 1))
    peer_s, ours_s = (statistics.median(timing.ended for timing in side) for side in (peer, ours))
    peer_reduced_s, ours_reduced_s = (
        statistics.median(timing.reduced for timing in side) for side in (peer, ours)
    )
    ratio = ours_s / peer_s
    line = (
        f"{case.launcher:12}{case.rank_count:5}{peer_reduced_s:18.2f}{peer_s:12.2f}"
        f"{ours_reduced_s:15.2f}{ours_s:9.2f}{ratio:8.2f}{case.target_ratio:8.2f}"
    )
    return line, ratio <= case.target_ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        return first_collective(arguments.rank_of)
    print(f"median seconds of {arguments.rounds} rounds on {len(os.sched_getaffinity(0))} cores")
    print(
        f"{'launcher':12}{'ranks':>5}{'torchrun reduced':>18}{'ended':>12}"
        f"{'atoll reduced':>15}{'ended':>9}{'ratio':>8}{'target':>8}"
    )
    met = True
    for case in CASES:
        line, reached = measured(case, arguments.rounds)
        print(line, flush=True)
        met = met and reached
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
