"""The faults of a run, written down and read again."""

import time
from dataclasses import replace

from atoll import run_dir
from atoll.health.faults import Fault, add_fault, faults, in_a_line


def test_faults_come_back_in_order(tmp_path):
    first = Fault("stalled", "node", "stopped for 60 s", "n1", 3, "cuda:3", 12, "compute")
    second = Fault("died", "code", "KeyError: 'x'", stack=["loop.py:3 loop"], time=17.5)
    add_fault(tmp_path, first)
    add_fault(tmp_path, second)
    told, later = faults(tmp_path)
    assert (replace(told, time=0.0), later) == (first, second)
    # none was given: as it was told, to a thousandth
    assert time.time() - 60 < told.time <= round(time.time(), 3)


def test_a_half_written_fault_is_left_out(tmp_path):
    add_fault(tmp_path, Fault("slow", "node", "1.4 of the median", "n1"))
    with open(run_dir.faults_file(tmp_path), "a") as file:
        file.write('{"kind": "di')
    assert [fault.kind for fault in faults(tmp_path)] == ["slow"]


def test_a_fault_in_a_line():
    fault = Fault("stalled", "node", "stopped for 60 s", "n1", 3, "cuda:3", 12, "compute")
    assert in_a_line(fault) == "rank 3 on n1 (cuda:3): step 12, compute: stopped for 60 s"
    assert in_a_line(Fault("died", "unknown", "no word")) == "no word"
