"""Start Python with torch, transformers and atoll: from the image against the .venv, in turns.

    make image-cpu
    python benchmarks/image_start.py [--image images/cpu.sif] [--rounds 7]

The image is one compressed file that is mounted; an environment is tens of thousands of files. On
the shared file system of a facility the many files cost more than here, on a local disk.
`cold` drops the page cache before each start, where this user may.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

IMPORTS = "import torch, transformers, atoll"
CACHES = Path("/proc/sys/vm/drop_caches")


def seconds(argv: list[str], cold: bool) -> float:
    """The wall time of one whole process."""
    if cold:
        os.sync()
        CACHES.write_text("3")
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", type=Path, default=Path("images/cpu.sif"))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    runtime = shutil.which("apptainer") or shutil.which("singularity")
    if runtime is None or not arguments.image.exists():
        print(f"no apptainer, or no {arguments.image}\nmake image-cpu", file=sys.stderr)
        return 2
    commands = {
        "image": [runtime, "-s", "exec", str(arguments.image), "python3", "-c", IMPORTS],
        ".venv": [sys.executable, "-c", IMPORTS],
    }
    for cold in (False, True):
        if cold and not os.access(CACHES, os.W_OK):
            continue
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(arguments.rounds + 1):
            for name, argv in commands.items():
                took = seconds(argv, cold)
                if number:  # the first round fills the file cache
                    times[name].append(took)
        medians = {name: statistics.median(numbers) for name, numbers in times.items()}
        cells = "   ".join(f"{name} {median:.2f} s" for name, median in medians.items())
        ratio = medians["image"] / medians[".venv"]
        print(f"{'cold' if cold else 'warm'}: {cells}   ratio {ratio:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
