"""README's numbers and figures are those of the results, and it stays short."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_the_numbers_are_the_newest_that_were_measured(monkeypatch):
    figures = script(ROOT / "benchmarks" / "readme_figures.py", monkeypatch)
    rows = list(script(ROOT / "benchmarks" / "results.py", monkeypatch).kept())
    assert figures.table(rows) in README, "make bench-report"
    assert figures.FIGURE.read_text() == figures.figure(rows), "make bench-report"


def test_what_is_faster_and_what_is_higher_count_the_same_way(monkeypatch):
    figures = script(ROOT / "benchmarks" / "readme_figures.py", monkeypatch)
    assert figures.times_faster({"ours": 6.0, "peers": 2.0, "better": "higher"}) == 3.0
    assert figures.times_faster({"ours": 2.0, "peers": 6.0, "better": "lower"}) == 3.0


def test_the_picture_has_every_facility(monkeypatch):
    overview = script(ROOT / "docs" / "images" / "overview.py", monkeypatch)
    names = overview.facilities()
    assert {"leonardo", "lumi", "polaris"} < set(names)
    assert overview.FIGURE.read_text() == overview.picture(names), f"python {overview.__file__}"


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.split()) <= 1200
    targets = [part.partition(")")[0] for part in README.split("](")[1:]]
    files = [each.partition("#")[0] for each in targets if not each.startswith("http")]
    assert [name for name in files if not (ROOT / name).exists()] == []
