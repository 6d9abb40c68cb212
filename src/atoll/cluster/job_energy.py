"""Joules of a run's jobs, as Slurm's accounting measured them where a site has it measure."""

import subprocess
from collections.abc import Sequence

SOURCE = "measured: Slurm"
UNKNOWN = 2**63  # Slurm's word for no value is one of the largest numbers of 64 bits


def slurm_energy(jobs: Sequence[tuple[str, str]]) -> tuple[float, str] | None:
    """Joules of all nodes of a run's jobs, and where the number comes from.

    `jobs`: scheduler and id of each, as `status.queued_jobs` gives them. None where Slurm has no
    figure: no plugin for it (AcctGatherEnergyType), no accounting, or no job of Slurm's.
    """
    ids = [job for scheduler, job in jobs if scheduler == "slurm"]
    joules = total(_asked(sacct_argv(ids))) if ids else 0
    return (float(joules), SOURCE) if joules else None


def sacct_argv(ids: Sequence[str]) -> list[str]:
    """With duplicates: a job that was queued again by its id is one line for each start."""
    words = ["--noheader", "--parsable2", "--allocations", "--duplicates"]
    return ["sacct", *words, f"--jobs={','.join(ids)}", "--format=ConsumedEnergyRaw"]


def total(lines: Sequence[str]) -> int:
    """The sum of all lines that hold a figure."""
    known = [int(line) for line in map(str.strip, lines) if line.isdecimal()]
    return sum(joules for joules in known if joules < UNKNOWN)


def _asked(argv: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(argv, capture_output=True, text=True)
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
