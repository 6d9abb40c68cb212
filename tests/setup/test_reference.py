"""The reference of settings has all of them, each with its type, unit, default and meaning."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from atoll.settings import setting_names
from atoll.settings.data import Source
from atoll.settings.federation import Campaign, Rule, Site
from atoll.settings.learning import ParameterGroup
from atoll.settings.machine import Queue

SCRIPT = Path(__file__).parents[2] / "setup" / "reference.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_has_a_row_or_a_heading(reference):
    page = reference.settings()
    missing = [n for n in setting_names() if f"| `{n}` |" not in page and f"## {n}\n" not in page]
    assert missing == []
    assert "| `spare_nodes` | int | nodes | `0` | that the job asks for as well" in page


def test_every_setting_of_a_campaign_has_a_row(reference):
    page = reference.campaign()
    names = [*Campaign.model_fields, *(f"rule.{name}" for name in Rule.model_fields)]
    names += [f"sites[].{name}" for name in Site.model_fields]
    groups = {"sites", "rule", "lora"}
    assert [n for n in names if f"| `{n}` |" not in page and n not in groups] == []
    assert "| `deadline_minutes` | float | minutes | `1440.0` | of a round |" in page
    assert "| `rule.quorum` | int |  | `1` | the fewest facilities" in page


def test_a_meaning_stands_behind_a_line_of_yaml_or_of_code(reference):
    text = "a: 1   # first\nb:\n  c: 2\n  d: '#'  # last\n"
    assert reference.yaml_comments(text) == {"a": "first", "b.d": "last"}
    assert reference.unit("gpu_memory_gib") == "GiB" and reference.unit("nodes") == ""


def test_what_code_says_of_itself_is_read_without_importing_it(reference):
    page = reference.code()
    assert "## atoll.train.loop\n" in page and "## atoll.config\n" in page


def test_settings_of_a_lists_entries_are_there(reference):
    page = reference.settings()
    assert "\n## data.sources[]\n" in page and "| `data.sources[].max_epochs` |" in page


def test_every_setting_has_a_meaning(reference):
    rows = [line.split(" | ") for line in reference.settings().splitlines() if line[:3] == "| `"]
    assert len(rows) > 180
    assert [row[0][2:] for row in rows if not row[-1].strip(" |")] == []


@pytest.mark.parametrize("model", [Campaign, Rule, Site, ParameterGroup, Queue, Source])
def test_every_setting_of_a_campaign_or_in_a_list_has_a_meaning(reference, model):
    meanings = reference.comments(model)
    assert [n for n in model.model_fields if not meanings.get(n) and n != "rule"] == []
