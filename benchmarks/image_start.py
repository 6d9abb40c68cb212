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
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import results

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
    rows = []
    for cold in (False, True):
        if cold and not os.access(CACHES, os.W_OK):
            continue
        ways = {name: partial(seconds, argv, cold) for name, argv in commands.items()}
        results.in_turns(ways, 1)  # fills the file cache
        image, venv = results.in_turns(ways, arguments.rounds).values()
        case = f"start, {'cold' if cold else 'warm'}"
        rows.append(results.row(case, "s", image, ".venv on a local disk", venv, "lower"))
    results.record("image_start", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
