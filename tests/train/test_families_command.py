"""`atoll models` says what the code says, and the docs show what it prints."""

import json
from pathlib import Path

import pytest
from transformers.utils import logging

from atoll.errors import UserError
from atoll.models.self_check import TRIED
from atoll.train import families

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(autouse=True)
def verbosity():
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.mark.login_node
def test_the_table_in_the_docs_is_what_it_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert families.main([]) == 0
    printed, warned = capsys.readouterr()
    assert not warned
    assert printed in DOCS.read_text(), "write what `atoll models` prints into docs/models.md"
    assert all(f"| {family} |" in printed for family in TRIED)


def test_refusals_are_sentences_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    families.main(["granite", "mixtral", "--json"])
    granite, mixtral = json.loads(capsys.readouterr().out)
    assert "outside its layers" in granite["pipeline"] and granite["tensor"] is None
    assert mixtral["experts"] and "no plan for tensor ranks" in mixtral["tensor"]


def test_a_family_that_nobody_tried_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    families.main(["seed_oss", "--json"])
    [row] = json.loads(capsys.readouterr().out)
    assert "seed_oss was never tried here: a small copy of it has the same loss" in row["tried"]
    with pytest.raises(UserError, match="knows no models of type 'llamma'"):
        families.main(["llamma"])
    with pytest.raises(UserError, match="in a way of its own"):
        families.main(["falcon"])
