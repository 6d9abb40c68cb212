"""The clock of the benchmark of overlapping rounds, where it is easily told by hand."""

import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WEIGHTS = {"0.weight": torch.zeros(3), "4.weight": torch.zeros(1)}  # fragments of 3/4 and 1/4


def test_a_facility_goes_on_while_another_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import overlapping_rounds as overlapping

    waits = {"north": [900.0, 0.0, 900.0], "east": [0.0, 900.0, 0.0]}  # each is slow in turns
    monkeypatch.setattr(overlapping, "START_SECONDS", 10.0)
    monkeypatch.setattr(overlapping, "FACILITIES", dict.fromkeys(waits, ("", 0.0, 2.0)))

    def ends(way: str) -> list[float]:
        facilities = []
        for name, seconds in waits.items():
            left = iter(seconds)
            queue = SimpleNamespace(wait_seconds=lambda now, left=left: next(left))
            facilities.append(SimpleNamespace(name=name, queue=queue))
        clock = overlapping.averaged_at(overlapping.WAYS[way], facilities, 50, WEIGHTS, 40.0)
        return list(islice(clock, 3))

    # down, the longest queue, start and steps, up; of fragments the line carries 3/4, 1/4, 3/4
    assert ends("whole models") == [1090.0, 2180.0, 3270.0]
    assert ends("fragments") == [1080.0, 1080.0 + 1050.0, 2130.0 + 1050.0]
    # the second round begins with the first model, which is there, once the first update is sent
    assert ends("fragments, overlap") == [1080.0, 180.0 + 900.0 + 110.0 + 10.0, 1200.0 + 1070.0]
    for name in ("overlapping_rounds", "steps_by_queue", "recorded_queues", "results"):
        sys.modules.pop(name, None)
