"""An entrypoint for the tests of the launcher that joins a process group, as a trainer does."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.launch import Placement

# Where this module, and torch with it, was imported: a forked rank inherits it from its parent.
IMPORTED_BY = os.getpid()


def all_reduce(run_folder: Path, placement: Placement) -> None:
    """Sum (rank + 1) over all ranks and write down what this rank saw."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    seen = {
        "total": int(total),
        "placement": vars(placement),
        "environment": {name: os.environ[name] for name in placement.environment()},
        "imported_by": IMPORTED_BY,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "omp_num_threads": os.environ["OMP_NUM_THREADS"],
        "threads": torch.get_num_threads(),
        "openblas_num_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
    }
    dist.destroy_process_group()
    (run_folder / f"rank-{placement.rank}.json").write_text(json.dumps(seen))
