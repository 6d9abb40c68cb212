"""Memory that is freed stays with the process: nothing faults in again."""

import os
import subprocess
import sys

CODE = """
import resource, sys
import torch
from atoll.federation.freed_memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def stretch():
    return [torch.ones(1 << 19) for _ in range(8)]
stretch()
before = faults()
for _ in range(20):
    stretch()
print(faults() - before)
"""


def faults(how: str) -> int:
    """Page faults of twenty times eight blocks of 2 MiB, which are freed together."""
    argv = [sys.executable, "-c", CODE, how]
    # what glibc begins with, which it would change by what was freed so far
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout)


def test_blocks_that_were_freed_are_used_again() -> None:
    assert faults("kept") < faults("as glibc does") / 10
