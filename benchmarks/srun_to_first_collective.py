"""How long from srun to the first collective on a real Slurm, and over how many connections.

    make testbed
    python benchmarks/srun_to_first_collective.py [--rounds 3] [--ranks 2 4 8 16] [--check]

On up to four virtual nodes, each rank runs `first_collective.py` under torchrun (an agent per node,
its c10d rendezvous, OMP_NUM_THREADS set) and under our `static` and `static_node`, in turns. Shown
are medians of the seconds from srun to the moment the last rank held the sum, and the TCP
connections that stood then between ranks and launchers (gloo's own mesh of ranks among them).
The nodes are one machine: connections are counted exactly, seconds are those of its few cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WORKER = Path(__file__).resolve().with_name("first_collective.py")
MOST_NODES = 4
PEER = "torchrun"
LAUNCHERS = (PEER, "static", "static_node")


class Timing(NamedTuple):
    """Seconds from srun to the last rank's sum; TCP connections at that moment."""

    seconds: float
    connections: float


def command(launcher: str, rank_count: int, port: int, folder: Path) -> list[str]:
    """The srun of one measurement."""
    nodes = min(MOST_NODES, max(1, rank_count // 2))
    per_node = rank_count // nodes
    tasks = per_node if launcher == "static" else 1
    srun = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--account=island"]
    srun += ["--overcommit", "--kill-on-bad-exit=1", f"--nodelist={names(nodes)}"]
    if launcher == PEER:
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=n1:{port}", f"--rdzv-id={port}"]
        agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
        return [*srun, *agent, f"--nproc-per-node={per_node}", *meeting, str(WORKER), str(folder)]
    fork = ["--fork", str(per_node)] if launcher == "static_node" else []
    ours = [sys.executable, "-m", "atoll", "launch", *fork, str(folder), f"{WORKER.stem}:main"]
    return [*srun, *ours]


def names(nodes: int) -> str:
    return "n1" if nodes == 1 else f"n[1-{nodes}]"


def timed(launcher: str, rank_count: int, port: int, folder: Path) -> Timing:
    """Run one to its end. Raises where it failed or a rank did not get its sum."""
    paths = [str(WORKER.parent), str(WORKER.parents[1] / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    start = time.time()
    subprocess.run(command(launcher, rank_count, port, folder), env=environment, check=True)
    reduced = [float(path.read_text()) for path in folder.glob("reduced-*")]
    if len(reduced) != rank_count:
        raise RuntimeError(f"{len(reduced)} of {rank_count} ranks wrote their time: {launcher}")
    ends: dict[str, int] = {}
    for path in folder.glob("sockets-*"):
        ends |= json.loads(path.read_text())
    return Timing(max(reduced) - start, sum(ends.values()) / 2)


def measured(rank_count: int, rounds: int, port: int) -> dict[str, Timing]:
    """Medians of each launcher; the launchers take turns."""
    timings_of: dict[str, list[Timing]] = {launcher: [] for launcher in LAUNCHERS}
    for number in range(rounds):
        for offset, launcher in enumerate(LAUNCHERS):
            with tempfile.TemporaryDirectory() as folder:
                at = port + 3 * number + offset
                timings_of[launcher].append(timed(launcher, rank_count, at, Path(folder)))
    return {
        launcher: Timing(*(statistics.median(column) for column in zip(*timings, strict=True)))
        for launcher, timings in timings_of.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--check", action="store_true", help="exit 1 where torchrun is not slower")
    arguments = parser.parse_args()
    if shutil.which("srun") is None:
        print("no Slurm here\nas root: make testbed", file=sys.stderr)
        return 2
    print(f"medians of {arguments.rounds} rounds on {len(os.sched_getaffinity(0))} cores")
    print(
        f"{'ranks':>5}" + "".join(f"{name + ' s':>15}{'TCP':>5}{'ratio':>7}" for name in LAUNCHERS)
    )
    slower = []
    for number, rank_count in enumerate(arguments.ranks):
        medians = measured(rank_count, arguments.rounds, 30000 + 100 * number)
        ratios = {name: medians[name].seconds / medians[PEER].seconds for name in LAUNCHERS}
        cells = [
            f"{medians[name].seconds:15.2f}{medians[name].connections:5.0f}{ratios[name]:7.2f}"
            for name in LAUNCHERS
        ]
        print(f"{rank_count:5}" + "".join(cells), flush=True)
        slower += [name for name in LAUNCHERS if ratios[name] > 1]
    return int(arguments.check and bool(slower))


if __name__ == "__main__":
    sys.exit(main())
