"""Ranks that are stopped, killed, stuck or wrong: named, told of once, ended within seconds."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_run

from atoll.health import heartbeat
from atoll.health.faults import Fault, faults

TESTS = Path(__file__).parents[1]
STALL_SECONDS = 1.5


@dataclass(frozen=True)
class End:
    code: int
    seconds: float
    stderr: str
    folder: Path

    @property
    def fault(self) -> Fault:
        (fault,) = faults(self.folder)
        return fault


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


def ended(folder: Path, fault: str, ranks: int = 3, **changes: object) -> End:
    """Launch a run of so many ranks on one node, and wait for its end."""
    changes = {"training__global_batch_samples": 2 * ranks, **changes}
    watch = {"stall_seconds": STALL_SECONDS, "slow_seconds": 60.0}
    run_folder = small_run.ready(small_run.settings(folder, ranks, watch=watch, **changes))
    began = time.monotonic()
    done = launched(run_folder, fault, ranks)
    assert leftovers(run_folder) == [], "no record stays in memory"
    return End(done.returncode, time.monotonic() - began, done.stderr, run_folder)


def launched(run_folder: Path, fault: str, ranks: int) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "atoll", "launch", "--fork", str(ranks), str(run_folder)]
    paths = os.pathsep.join([str(TESTS), str(TESTS / "health"), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "FAULT": fault}
    return subprocess.run(
        [*argv, "faulty_ranks:main"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def leftovers(run_folder: Path) -> list[Path]:
    pattern = heartbeat.node_folder(run_folder, "*", 0)
    return list(pattern.parent.glob(pattern.name))


def told(end: End) -> list[str]:
    return [line for line in end.stderr.splitlines() if line.startswith("atoll: ")]


CASES = [
    # fault, rank, kind, blame, phase, what the evidence says
    ("stop:4:1", 1, "stalled", "node", None, "stopped (state T); 2 wait in gloo:"),
    ("stop:4:0", 0, "stalled", "node", None, "stopped (state T); 2 wait in gloo:"),
    ("stop:4:0,1,2", 0, "stalled", "node", None, "stopped (state T), as all 3 of its node"),
    ("kill:4:2", 2, "died", "node", None, "its process is gone"),
    ("kill:4:0", 0, "died", "node", None, "its process is gone"),
    ("crash:4:1", 1, "died", "unknown", None, "gone by SIGSEGV"),
    ("error:4:1", 1, "died", "code", None, "ValueError: 3 apples are missing"),
    ("input:4:2", 2, "stalled", "data", "input", "it stays in next_share"),
    ("absent:4:1", 1, "stalled", "code", None, "it stays in <lambda> (state S); 2 wait in gloo:"),
]


@pytest.mark.parametrize(("fault", "rank", "kind", "blame", "phase", "evidence"), CASES)
def test_the_culprit_is_named_and_all_ranks_end(
    folder: Path, fault: str, rank: int, kind: str, blame: str, phase: str | None, evidence: str
) -> None:
    end = ended(folder, fault)
    assert end.code != 0
    assert (end.fault.rank, end.fault.kind, end.fault.blame) == (rank, kind, blame), end
    assert evidence in end.fault.evidence
    assert end.fault.step == 4 and end.fault.node == os.uname().nodename
    assert phase in (None, end.fault.phase)
    assert len(told(end)) == 1 and f"rank {rank} on" in told(end)[0]
    (record,) = small_run.records(end.folder, "fault")
    assert record["evidence"] == end.fault.evidence
    assert end.seconds < 30
