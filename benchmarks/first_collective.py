"""What each rank of `launch_to_first_collective.py` runs, whichever launcher started it.

As a trainer does, it imports torch and transformers when it is loaded.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers


def main(run_folder: Path, placement: object = None) -> int:
    """Sum one number over all ranks, and write down when this rank held the sum."""
    assert transformers.__version__
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    (run_folder / f"reduced-{dist.get_rank()}").write_text(repr(time.time()))
    dist.destroy_process_group()
    return 0 if int(ones) == int(os.environ["WORLD_SIZE"]) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
