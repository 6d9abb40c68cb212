"""The coordinate check tells a width that holds a learning rate from one that does not."""

import argparse
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def coordinate_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("results", "coordinate_check"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import coordinate_check

    return coordinate_check


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.full)])
def test_a_change_grows_with_the_width_only_without_mup(
    coordinate_check: ModuleType, optimizer: str
) -> None:
    arguments = argparse.Namespace(widths=[32, 128], steps=2, seeds=1, learning_rate=1e-3)
    logits, hidden = coordinate_check.rows_of(optimizer, arguments)
    assert logits["peers"] > 2 > 1.2 > logits["ours"]
    assert hidden["peers"] > 3 and 0.7 < hidden["ours"] < 1.4
    drawn = ElementTree.fromstring(coordinate_check.figure([logits, hidden]))
    text = " ".join(drawn.itertext())
    assert f"{optimizer}, muP" in text and f"{optimizer}, without muP" in text
