"""Who is named, from what nodes wrote down: a table."""

import json
from dataclasses import replace
from typing import Any

import pytest

from atoll.health.culprit import culprit
from atoll.health.node_record import (
    GONE,
    NodeRecord,
    RankState,
    fatal_signal,
    main_stack,
    memory_kills,
    read_nodes,
    write,
)
from atoll.health.recorder import condensed

WAITING = {"name": "nccl:all_reduce", "number": 40, "group": "0"}
CLOSED = "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
NCCL = "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:35, remote process exited"
ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def rank(number: int, **changes: Any) -> RankState:
    """A rank that waits for the others, in step 7."""
    state = RankState(
        rank=number,
        device=f"cuda:{number % 2}",
        pid=100 + number,
        process="S",
        step=7,
        phase="compute",
        stack=["train.py:9 in train", "distributed_c10d.py:30 in all_reduce"],
        answered=True,
        pending=[WAITING],
        entered={"0": 40},
    )
    return replace(state, **changes)


def nodes(changed: dict[int, dict[str, Any]], reason: str = "stalled") -> list[NodeRecord]:
    """Four ranks on two nodes."""
    ranks = [rank(number, **changed.get(number, {})) for number in range(4)]
    return [NodeRecord(n, f"n{n}", reason, 50.0, ranks[2 * n : 2 * n + 2]) for n in range(2)]


def failed(error: str, moved: float = 49.0) -> dict[str, Any]:
    return {"error": error, "moved": moved, "pending": []}


FREE: dict[str, Any] = {"pending": [], "entered": {"0": 39}}
STOPPED: dict[str, Any] = {"process": "T", "answered": False, "pending": [], "stack": []}
DEAD: dict[str, Any] = {"process": GONE, "answered": False, "pending": [], "stack": []}
CRASHED: dict[str, Any] = {**DEAD, "killed_by": 11, "phase": "communication"}
OTHER = {"pending": [{"name": "nccl:all_gather", "number": 40, "group": "0"}]}
INPUT = {**FREE, "phase": "input", "stack": ["loader.py:3 in next_share"]}
CASES: list[tuple[str, dict[int, dict[str, Any]], tuple[Any, ...], str]] = [
    ("stopped", {3: STOPPED}, (3, "stalled", "node"), "stopped (state T); 3 wait for it there"),
    ("node stopped", {2: STOPPED, 3: STOPPED}, (2, "stalled", "node"), "as all 2 of its node"),
    ("killed", {1: DEAD}, (1, "died", "node"), "its process is gone, and left no error"),
    ("signal", {1: {**DEAD, "killed_by": 9}}, (1, "died", "node"), "gone by SIGKILL"),
    ("crash", {1: {**DEAD, "killed_by": 11}}, (1, "died", "unknown"), "gone by SIGSEGV"),
    (
        "killed, then the peers fail",
        {1: DEAD, 0: failed(CLOSED), 2: failed(NCCL), 3: failed(CLOSED)},
        (1, "died", "node"),
        "its process is gone",
    ),
    (
        "an error, then the peers fail, one in words of its own",
        {0: failed(CLOSED, 40.1), 2: failed("ValueError: 3", 40.0), 3: failed("KeyError: 4", 40.3)},
        (2, "died", "code"),
        "it failed: ValueError: 3",
    ),
    (
        "what fails behind a death is no cause",
        {0: failed("RuntimeError: odd", 49.5), 2: DEAD},
        (2, "died", "node"),
        "its process is gone",
    ),
    (
        "an error, then a launcher kills the others",
        {0: failed("ValueError: 3", 40.0), 2: DEAD},
        (0, "died", "code"),
        "it failed: ValueError: 3",
    ),
    (
        "killed, then a peer crashes where it waits for it",
        {0: CRASHED, 1: DEAD, 3: failed(CLOSED)},
        (1, "died", "node"),
        "its process is gone",
    ),
    (
        "an error, then a peer crashes where it waits for it",
        {0: CRASHED, 2: failed("ValueError: 3")},
        (2, "died", "code"),
        "it failed: ValueError: 3",
    ),
    ("a crash in an exchange alone", {2: CRASHED}, (2, "died", "unknown"), "gone by SIGSEGV"),
    ("device", {1: failed(ECC)}, (1, "died", "node"), "uncorrectable ECC"),
    (
        "absent on a device",
        {1: FREE},
        (1, "stalled", "unknown"),
        "it stays in all_reduce (state S)",
    ),
    ("absent", {1: FREE | {"device": "cpu"}}, (1, "stalled", "code"), "3 wait for it there"),
    ("input", {1: INPUT}, (1, "stalled", "unknown"), "it stays in next_share"),
    ("disk", {1: {**INPUT, "process": "D"}}, (1, "stalled", "node"), "does not return (state D)"),
    (
        "stuck in C code",
        {2: {"answered": False, "pending": [], "stack": []}},
        (2, "stalled", "unknown"),
        "it does not answer",
    ),
    (
        "desync",
        {2: OTHER},
        (2, "stalled", "code"),
        "it waits there, 3 others in nccl:all_reduce 40 of group 0",
    ),
    (
        "a step behind",
        {1: {**FREE, "step": 6}, 3: FREE},
        (1, "stalled", "unknown"),
        "2 wait for it",
    ),
    ("the network", {}, (None, "stalled", "unknown"), "none of 4 ranks moves, all are there"),
    (
        "no recorder",
        {n: {"pending": [], "phase": "input" if n == 2 else "compute"} for n in range(4)},
        (2, "stalled", "unknown"),
        "it stays in all_reduce",
    ),
    (
        "all in a loader",
        dict.fromkeys(range(4), INPUT),
        (None, "stalled", "unknown"),
        "none of 4 ranks moves, all are in input",
    ),
]


@pytest.mark.parametrize(
    ("changed", "named", "evidence"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_the_culprit(changed, named, evidence) -> None:
    fault = culprit(nodes(changed), 2, missing_speaks=True)
    assert fault is not None
    assert (fault.rank, fault.kind, fault.blame) == named
    assert evidence in fault.evidence
    assert fault.step == 7 or changed[fault.rank or 0].get("step") == fault.step
    if fault.rank is not None:
        assert fault.node == f"n{fault.rank // 2}"


def test_a_silent_node_is_at_fault_only_where_nobody_else_is() -> None:
    heard, silent = nodes({0: failed(CLOSED), 1: failed(NCCL)})
    silent = replace(silent, reason="")
    fault = culprit([heard, silent], 2, missing_speaks=True)
    assert fault is not None and (fault.node, fault.blame) == ("n1", "node")
    fault = culprit([heard, silent], 2, missing_speaks=False)
    assert fault is not None and (fault.node, fault.blame) == ("n1", "unknown")
    heard = nodes({0: STOPPED})[0]
    fault = culprit([heard, silent], 2, missing_speaks=True)
    assert fault is not None and (fault.node, fault.rank) == ("n0", 0)
    fault = culprit([nodes({})[0]], 3, missing_speaks=True)
    assert fault is not None and (fault.node, fault.blame) == ("", "unknown")


def test_a_job_whose_memory_was_full_speaks_against_no_node() -> None:
    first, second = nodes({3: DEAD}, reason="died")
    fault = culprit([first, replace(second, memory_kills=1)], 2, missing_speaks=True)
    assert fault is not None and (fault.rank, fault.blame) == (3, "code")
    assert "memory was full" in fault.evidence


def test_the_kernel_s_kills_are_those_of_the_whole_job(tmp_path) -> None:
    task = tmp_path / "system.slice" / "job_7" / "step_0" / "task_1"
    task.mkdir(parents=True)
    assert memory_kills("0::/system.slice/job_7/step_0/task_1\n", tmp_path) == 0
    (task / "memory.events").write_text("low 0\noom_kill 0\n")
    (task.parents[1] / "memory.events").write_text("low 0\noom 2\noom_kill 2\n")
    assert memory_kills("0::/system.slice/job_7/step_0/task_1\n", tmp_path) == 2
    assert memory_kills("1:name=systemd:/x\n", tmp_path) == 0


def test_a_mistake_and_a_good_end_are_no_fault() -> None:
    mistake = {n: failed("UserError: 4 apples") | {"phase": "start"} for n in range(4)}
    assert culprit(nodes(mistake), 2, missing_speaks=True) is None
    assert culprit(nodes({}, reason=""), 2, missing_speaks=False) is None
    later = {n: failed("UserError: disk full") for n in range(1)}
    fault = culprit(nodes(later), 2, missing_speaks=True)
    assert fault is not None and (fault.rank, fault.blame) == (0, "code")


def test_nodes_are_read_as_they_were_written(tmp_path) -> None:
    records = nodes({1: DEAD})
    for record in records:
        write(tmp_path, record)
    (tmp_path / "node-00007.json").write_text("")  # its node went down while it was written
    assert read_nodes(tmp_path) == records
    assert json.loads((tmp_path / "node-00001.json").read_text())["node"] == "n1"


STACKS = """Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/a/threading.py", line 3 in wait

Current thread 0x00007f00000000ff (most recent call first):
  File "/a/inner.py", line 2 in inner
  File "/a/outer.py", line 1 in outer
"""


def test_of_all_stacks_that_of_the_main_thread_is_kept() -> None:
    assert main_stack(STACKS, 0x7F00000000FF) == [
        "/a/outer.py:1 in outer",
        "/a/inner.py:2 in inner",
    ]
    assert main_stack(STACKS, 0x7F0000000001) == ["/a/threading.py:3 in wait"]
    assert main_stack("", 1) == []
    answers = "".join(
        f'Stack (most recent call first):\n  File "/a/{n}.py", line {n} in at\n' for n in (1, 2)
    )
    assert main_stack(answers, 1) == ["/a/2.py:2 in at"]
    assert fatal_signal(STACKS) == 11 and fatal_signal(STACKS[30:]) == 0


def test_what_a_recorder_knows_becomes_what_is_waited_for() -> None:
    def entry(record: int, number: int, **more: Any) -> dict[str, Any]:
        place = {"record_id": record, "collective_seq_id": number, "process_group": ["1", "tp"]}
        return {**place, "profiling_name": "nccl:all_gather", "state": "scheduled", **more}

    entries = [entry(1, 1, retired=True), entry(3, 3), entry(2, 2, state="started")]
    assert condensed([*entries, entry(0, 0, state="completed")]) == {
        "pending": [
            {"name": "nccl:all_gather", "number": number, "group": "1", "state": state}
            for number, state in ((2, "started"), (3, "scheduled"))
        ],
        "entered": {"1": 3},
    }
    assert condensed([]) == {"pending": [], "entered": {}}
