"""Time `atoll compose`, the whole process, against a training script that is its own Hydra app.

The peer is the usual arrangement: one `@hydra.main` script that imports torch and transformers at
its top and prints the same configuration tree (`--cfg job`). Both run in turns; medians are shown.

    python benchmarks/host_start.py [--rounds N] [--check]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import results

TREE = Path(__file__).resolve().parents[1] / "hydra_conf"
LIMIT_SECONDS = 1.5
PEER = f"""\
import hydra
import torch
import transformers

@hydra.main(version_base="1.3", config_path={str(TREE)!r}, config_name="run")
def train(config):
    raise SystemExit("--cfg only prints")

train()
"""


def seconds(argv: list[str]) -> float:
    """The wall time of one whole process."""
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="host side start-up against a plain Hydra app")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help=f"fail beyond {LIMIT_SECONDS} s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(PEER)
        commands = {
            "atoll compose": [sys.executable, "-m", "atoll", "compose", "facility=laptop"],
            "plain Hydra app": [sys.executable, str(script), "facility=laptop", "--cfg", "job"],
        }
        ways = {name: partial(seconds, argv) for name, argv in commands.items()}
        results.in_turns(ways, 1)  # fills the file cache
        ours, peer = results.in_turns(ways, arguments.rounds).values()
    limit = "what it may take"
    rows = [
        results.row("atoll compose", "s", ours, "plain Hydra app", peer, "lower", 1.0),
        results.row("atoll compose", "s", ours, limit, [LIMIT_SECONDS], "lower", 1.0),
    ]
    return int(not results.record("host_start", rows) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
