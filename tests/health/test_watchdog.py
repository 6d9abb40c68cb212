"""Ranks that are stopped, killed, stuck or wrong: named, told of once, ended within seconds."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faulty_ranks
import pytest
import small_run
from rank_pool import RankPool, free_port

from atoll import run_dir
from atoll.health import heartbeat, judge, node_record
from atoll.health.faults import Fault, faults
from atoll.health.node_record import NodeRecord, RankState
from atoll.health.watchdog import Watched
from atoll.launch import Placement

TESTS = Path(__file__).parents[1]
STALL_SECONDS = 2.0
# from the moment a fault was seen until all ranks had ended, on a machine that others use as well
MOST_SECONDS = 30


@dataclass(frozen=True)
class End:
    codes: list[int | None]  # of each process
    time: float  # seconds since 1970
    stderr: str
    folder: Path

    @property
    def fault(self) -> Fault:
        (fault,) = faults(self.folder)
        return fault

    @property
    def told(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("atoll: ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


def prepared(folder: Path, ranks: int, nodes: int, **changes: object) -> Path:
    changes = {"training__global_batch_samples": 2 * ranks * nodes, "nodes": nodes, **changes}
    changes = {"watch": {"stall_seconds": STALL_SECONDS, "slow_seconds": 60.0}} | changes
    return small_run.ready(small_run.settings(folder, ranks, **changes))


def ended(
    pool: RankPool, folder: Path, fault: str, ranks: int = 3, nodes: int = 1, **changes: object
) -> End:
    """Start a run of so many ranks on each of so many nodes, and wait for its end."""
    run_folder, port = prepared(folder, ranks, nodes, **changes), free_port()
    output = folder / "stderr"
    processes = [
        pool.context.Process(
            target=faulty_ranks.run_rank, args=(run_folder, fault, placed(number), output)
        )
        for number in range(ranks * nodes)
        for placed in [partial(placement, ranks=ranks, nodes=nodes, port=port)]
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    ended_at = time.time()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if not fault.startswith("node"):
        wait_for_watchers(run_folder)
    return End(codes, ended_at, output.read_text(), run_folder)


def placement(number: int, ranks: int, nodes: int, port: int) -> Placement:
    node, local = divmod(number, ranks)
    return Placement(number, ranks * nodes, local, ranks, node, nodes, "127.0.0.1", port, "fork")


def wait_for_watchers(run_folder: Path) -> None:
    """They leave nothing in memory."""
    pattern = heartbeat.node_folder(run_folder, "*", 0).with_suffix("").name[:-1] + "*"
    parent, deadline = heartbeat.node_folder(run_folder, "0", 0).parent, time.monotonic() + 5
    while list(parent.glob(pattern)):
        assert time.monotonic() < deadline, list(parent.glob(pattern))
        time.sleep(0.05)


CASES = [
    # fault, rank, kind, blame, phase, what the evidence says
    pytest.param(
        "stop:4:1",
        1,
        "stalled",
        "node",
        None,
        "stopped (state T); 2 wait for it there",
        marks=pytest.mark.matrix,
    ),
    ("stop:4:0", 0, "stalled", "node", None, "stopped (state T); 2 wait for it there"),
    pytest.param(
        "stop:4:0,1,2",
        0,
        "stalled",
        "node",
        None,
        "stopped (state T), as all 3 of its node",
        marks=pytest.mark.matrix,
    ),
    ("kill:4:2", 2, "died", "node", None, "its process is gone"),
    pytest.param(
        "kill:4:0", 0, "died", "node", None, "its process is gone", marks=pytest.mark.matrix
    ),
    pytest.param(
        "crash:4:1", 1, "died", "unknown", None, "gone by SIGSEGV", marks=pytest.mark.matrix
    ),
    ("error:4:1", 1, "died", "code", None, "ValueError: 3 apples are missing"),
    pytest.param(
        "input:4:2",
        2,
        "stalled",
        "unknown",
        "input",
        "it stays in next_share",
        marks=pytest.mark.matrix,
    ),
    (
        "absent:4:1",
        1,
        "stalled",
        "code",
        None,
        "it stays in <lambda> (state S); 2 wait for it there",
    ),
    pytest.param(
        "other:4:1",
        1,
        "stalled",
        "code",
        None,
        "it waits there, 2 others in gloo:",
        marks=pytest.mark.matrix,
    ),
]


@pytest.mark.parametrize(("fault", "rank", "kind", "blame", "phase", "evidence"), CASES)
def test_the_culprit_is_named_and_all_ranks_end(
    ranks: RankPool,
    folder: Path,
    fault: str,
    rank: int,
    kind: str,
    blame: str,
    phase: str | None,
    evidence: str,
) -> None:
    end = ended(ranks, folder, fault)
    assert 0 not in end.codes and None not in end.codes
    assert (end.fault.rank, end.fault.kind, end.fault.blame) == (rank, kind, blame), end
    assert evidence in end.fault.evidence
    assert end.fault.step == 4 and end.fault.node == "n0"
    assert phase in (None, end.fault.phase)
    assert len(end.told) == 1 and f"rank {rank} on n0" in end.told[0]
    (record,) = small_run.records(end.folder, "fault")
    assert record["evidence"] == end.fault.evidence
    assert end.stderr.count("Traceback") == int(fault.startswith("error")), "of the culprit alone"
    assert end.time - end.fault.time < MOST_SECONDS


NODE_CASES = [
    # fault, node, rank, kind, blame, what the evidence says
    pytest.param(
        "stop:4:3",
        "n1",
        3,
        "stalled",
        "node",
        "stopped (state T); 3 wait for it there",
        marks=pytest.mark.matrix,
    ),
    ("kill:4:2", "n1", 2, "died", "node", "its process is gone"),
    pytest.param(
        "error:4:2",
        "n1",
        2,
        "died",
        "code",
        "ValueError: 3 apples are missing",
        marks=pytest.mark.matrix,
    ),
    ("node:4:2,3", "n1", 2, "died", "node", "the node says nothing any more, nor do its 2 ranks"),
    pytest.param(
        "node:4:0,1",
        "n0",
        0,
        "died",
        "node",
        "the node says nothing any more, nor do its 2 ranks",
        marks=pytest.mark.matrix,
    ),
]


@pytest.mark.parametrize(("fault", "node", "rank", "kind", "blame", "evidence"), NODE_CASES)
def test_a_fault_on_another_node_is_told_of_once(
    ranks: RankPool,
    folder: Path,
    fault: str,
    node: str,
    rank: int,
    kind: str,
    blame: str,
    evidence: str,
) -> None:
    end = ended(ranks, folder, fault, ranks=2, nodes=2)
    assert 0 not in end.codes and None not in end.codes
    assert (end.fault.node, end.fault.rank) == (node, rank), end
    assert (end.fault.kind, end.fault.blame) == (kind, blame)
    assert evidence in end.fault.evidence
    assert len(end.told) == 1
    assert end.time - end.fault.time < MOST_SECONDS


def test_the_shell_judges_what_nobody_did(tmp_path: Path, capfd) -> None:
    """A launcher ended the watchers before there was a verdict."""
    run_dir.lease_folder(tmp_path).mkdir()
    (run_dir.lease_folder(tmp_path) / "3").write_text("slurm 77 0 n0 1 2 machine\n")
    records = run_dir.node_records(tmp_path) / "3-0-29500"
    gone = RankState(1, "cpu", pid=9, step=4, phase="compute")
    node_record.write(records, NodeRecord(0, "n0", ranks=[RankState(0, "cpu")]))
    node_record.write(records, NodeRecord(1, "n1", "died", 5.0, [gone]))
    assert judge.main([str(tmp_path)]) == 0
    (fault,) = faults(tmp_path)
    assert (fault.node, fault.rank, fault.blame, fault.job) == ("n1", 1, "node", "77")
    assert judge.main([str(tmp_path)]) == 0
    assert len(faults(tmp_path)) == 1, "once"
    assert capfd.readouterr().err.count("atoll: rank 1 on n1") == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_watcher_without_its_folder_ends(tmp_path: Path, when: str) -> None:
    """Whoever took it away: nobody waits for one that looks at nothing."""
    folder = tmp_path / "memory"
    facts = Watched(
        str(tmp_path), str(tmp_path / "records"), str(folder), 0, 1, 0, 1, "cpu", None, 1800.0
    )
    if when == "after":
        heartbeat.begin(folder, 0)
    argv = [sys.executable, "-m", "atoll.health.watchdog", facts.in_words()]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        if when == "after":
            while not heartbeat.is_watched(folder):
                time.sleep(0.02)
            shutil.rmtree(folder)
        assert process.communicate(timeout=20)[1] == ""
    finally:
        process.kill()
    assert process.returncode == 0


RANK = """
import signal, sys, time
from pathlib import Path
from atoll.health import heartbeat
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
heartbeat.begin(Path(sys.argv[1]), int(sys.argv[2]))
time.sleep(60)
"""


def test_ranks_end_where_nothing_can_be_written_down(tmp_path: Path) -> None:
    """As on a full disk: nobody waits for records and a verdict that cannot come."""
    folder, records = tmp_path / "memory", tmp_path / "file" / "records"
    records.parent.write_text("no folder")
    facts = Watched(str(tmp_path), str(records), str(folder), 0, 2, 0, 2, "cpu", None, 1800.0)
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, folder, str(n)]) for n in range(2)]
    try:
        while len(heartbeat.read_all(folder, range(2))) < 2:
            time.sleep(0.02)
        ranks[0].kill()
        ranks[0].wait()
        argv = [sys.executable, "-m", "atoll.health.watchdog", facts.in_words()]
        watcher = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert (watcher.returncode, watcher.stderr) == (0, "")
        assert ranks[1].wait(1) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()


def test_slow_phases_are_left_alone(ranks: RankPool, folder: Path) -> None:
    """An evaluation and a checkpoint of longer than watch.stall_seconds."""
    cadence: dict[str, Any] = {"checkpoint__every_steps": 3, "evaluation__every_steps": 3}
    watch = {"stall_seconds": 4.0, "slow_seconds": 60.0}
    cadence |= {"training__steps": 4, "watch": watch}
    end = ended(ranks, folder, "slow:1:0,1", ranks=2, **cadence)
    assert end.codes == [0, 0], end.stderr
    assert faults(end.folder) == [] and end.told == []
    assert not run_dir.node_records(end.folder).exists(), "nothing stays of a run that is well"


def test_a_user_s_mistake_is_no_fault(ranks: RankPool, folder: Path) -> None:
    end = ended(ranks, folder, "mistake:1:0,1", ranks=2)
    assert end.codes == [2, 2] and "take 3" in end.stderr
    assert faults(end.folder) == [] and len(end.told) == 2, "each rank's own words"


@pytest.mark.parametrize(
    ("option", "fault"),
    [("--fork", "error:4:1"), pytest.param("--local-ranks", "stop:4:1", marks=pytest.mark.matrix)],
)
def test_a_launcher_ends_with_its_ranks(folder: Path, option: str, fault: str) -> None:
    """Ranks that a launcher forked, and ranks that are processes of their own from the start."""
    run_folder = prepared(folder, 2, 1)
    argv = [sys.executable, "-m", "atoll", "launch", option, "2", str(run_folder)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "health"), *sys.path]),
        "FAULT": fault,
        "SLURMD_NODENAME": "n0",
    }
    done = subprocess.run(
        [*argv, "faulty_ranks:main"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    end = End([done.returncode], time.time(), done.stderr, run_folder)
    assert done.returncode != 0, end.stderr
    assert end.fault.rank == 1
    assert len(end.told) == 1 and "rank 1 on n0 (cpu): step 4" in end.told[0]
    assert end.stderr.count("Traceback") == int(fault.startswith("error"))
    assert end.time - end.fault.time < MOST_SECONDS
