"""Rehearsals: a small job under the constraints of each facility, on a Slurm that has them."""

import json
import os
import subprocess
import sys

import pytest
from testbed_site import HOW, ROOT

from atoll.config.compose import config_tree, groups

# With binds, queues of several limits, a mask for each task, and names of a fabric.
ALWAYS = "lumi"
OTHERS = sorted(set(groups(config_tree())["facility"]) - {ALWAYS})


def rehearsed(*words: str) -> dict[str, tuple[str, str]]:
    """Constraint -> state and words."""
    command = [sys.executable, "-m", "atoll", "rehearse", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode in (0, 1), done.stderr
    return {row["subject"]: (row["state"], row["words"]) for row in json.loads(done.stdout)}


@pytest.fixture(autouse=True)
def ready() -> None:
    socket = "/var/lib/atoll-testbed/run/mysql.sock"
    images = list((ROOT / "images").glob("cpu*.sif"))
    if os.geteuid() != 0 or not os.path.exists(socket) or not images:
        pytest.skip(HOW)


@pytest.mark.parametrize(
    "facility", [ALWAYS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_a_facility_as_far_as_this_machine_knows(facility: str) -> None:
    rows = rehearsed(f"facility={facility}")
    assert [(name, row) for name, row in rows.items() if row[0] == "differs"] == []
    nothing_to_run = "support" in rows or facility == "ssh_hosts"
    assert nothing_to_run or rows["job"][0] == rows["network"][0] == "passed"


def test_what_the_scheduler_would_refuse_is_told() -> None:
    rows = rehearsed(f"facility={ALWAYS}", "facility.submit.qos=nobody")
    assert rows["scheduler"][0] == "differs"
    assert "Invalid qos" in rows["scheduler"][1]
