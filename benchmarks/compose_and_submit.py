"""Compose, check, write the run folder and queue a job: the whole command, against bare sbatch.

    make testbed image-cpu
    python benchmarks/compose_and_submit.py [--rounds 7] [--check]

Both queue a job on a real Slurm, in turns, and cancel it at once. The peer is what Slurm itself
takes for a job that does nothing; all beyond that is ours.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    times: dict[str, list[float]] = {"atoll submit": [], "sbatch": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds + 1):
            submit = [sys.executable, "-m", "atoll", "submit", *line, f"name=held-{number}"]
            ours = timed(submit, folder)
            peer = timed(["sbatch", *SLURM, "--wrap=true"], folder)
            if number:  # the first round fills the file cache
                times["atoll submit"].append(ours)
                times["sbatch"].append(peer)
    medians = {name: statistics.median(numbers) for name, numbers in times.items()}
    for name, median in medians.items():
        print(f"{name:14}{median:6.2f} s")
    print(f"{'difference':14}{medians['atoll submit'] - medians['sbatch']:6.2f} s")
    return int(arguments.check and medians["atoll submit"] >= LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
