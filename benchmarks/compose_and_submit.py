"""Compose, check, write the run folder and queue a job: the whole command, against bare sbatch.

    make testbed image-cpu
    python benchmarks/compose_and_submit.py [--rounds 7] [--check]

Both queue a job on a real Slurm, in turns, and cancel it at once. The peer is what Slurm itself
takes for a job that does nothing; all beyond that is ours.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import results

LIMIT_SECONDS = 2.0
CLONE = Path(__file__).resolve().parents[1]
SLURM = ["--account=island", "--parsable", "--output=/dev/null", "--hold"]


def timed(argv: list[str], folder: str) -> float:
    """The wall time of one submission, whose job is then cancelled."""
    start = time.perf_counter()
    done = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=folder)
    took = time.perf_counter() - start
    job = done.stdout.removeprefix("job ").split(":")[0].split()[0]
    subprocess.run(["scancel", job], check=True)
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help=f"fail beyond {LIMIT_SECONDS} s")
    arguments = parser.parse_args()
    image = CLONE / "images" / "cpu.sif"
    if shutil.which("sbatch") is None or not image.exists():
        print("no Slurm, or no image\nas root: make testbed image-cpu", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = str(CLONE / "src")
    line = ["facility=testbed", "nodes=4", f"image.file={image}", "+facility.submit.hold=true"]
    submit, numbers = [sys.executable, "-m", "atoll", "submit", *line], count()
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "ours": lambda: timed([*submit, f"name=held-{next(numbers)}"], folder),
            "sbatch": lambda: timed(["sbatch", *SLURM, "--wrap=true"], folder),
        }
        results.in_turns(ways, 1)  # fills the file cache
        ours, peer = results.in_turns(ways, arguments.rounds).values()
    rows = [
        results.row("atoll submit", "s", ours, "bare sbatch", peer, "lower"),
        results.row("atoll submit", "s", ours, "what it may take", [LIMIT_SECONDS], "lower", 1.0),
    ]
    return int(not results.record("compose_and_submit", rows) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
