"""Waits of recorded jobs, as the benchmark of steps by queue replays them."""

import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LOG = """\
; Computer: none
 1 100  30 9 4 -1 -1 4 60 -1 1 1 1 -1 -1 -1 -1 -1
 2 150 700 9 1 -1 -1 1 60 -1 1 1 1 -1 -1 -1 -1 -1
 3 160  -1 9 8 -1 -1 8 60 -1 1 1 1 -1 -1 -1 -1 -1
 4 200  90 9 8 -1 -1 8 60 -1 1 1 1 -1 -1 -1 -1 -1
 5 400 600 9 5 -1 -1 5 60 -1 1 1 1 -1 -1 -1 -1 -1
"""


def test_a_round_waits_as_the_next_job_of_its_size_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from recorded_queues import Recorded, recorded_queue

    log = tmp_path / "reef.swf"
    log.write_text(LOG)
    queue = recorded_queue(log, 0, random.Random(1))
    assert queue.submitted == [0, 100, 300] and queue.median_minutes == 1.5
    assert 0 <= queue.begin <= 300
    from_begin = Recorded(queue.submitted, queue.waited, begin=0.0)
    assert [from_begin.wait_seconds(now) for now in (0, 1, 100, 101, 299, 301)] == [
        30, 90, 90, 600, 600, 90,
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="0 jobs of 9 processors or more: name another"):
        recorded_queue(log, 1, random.Random(1))
    sys.modules.pop("recorded_queues")
