"""What each rank of the launch benchmarks runs, whichever launcher started it.

As a trainer does, it imports torch and transformers when it is loaded.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

ESTABLISHED = "01"


def main(run_folder: Path, placement: object = None) -> int:
    """Sum one number over all ranks; write down when this rank held the sum, and its sockets."""
    assert transformers.__version__
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    rank, now = dist.get_rank(), time.time()
    # whoever started this rank, on this machine, may hold connections of its own
    sockets = {pid: connection_ends(pid) for pid in (os.getpid(), os.getppid())}
    dist.barrier()  # nobody leaves while another one counts
    (run_folder / f"sockets-{rank}").write_text(json.dumps(sockets))
    (run_folder / f"reduced-{rank}").write_text(repr(now))
    dist.destroy_process_group()
    return 0 if int(ones) == int(os.environ["WORLD_SIZE"]) else 1


def connection_ends(pid: int) -> int:
    """How many ends of established TCP connections a process holds."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    established = {f"socket:[{row[9]}]" for row in rows if row[3] == ESTABLISHED}
    return sum(link in established for link in links(Path(f"/proc/{pid}/fd")))


def links(folder: Path) -> list[str]:
    """What a process has open; a file that is closed meanwhile is left out."""
    targets = []
    for path in folder.iterdir():
        try:
            targets.append(os.readlink(path))
        except OSError:
            continue
    return targets


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
