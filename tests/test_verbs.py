"""The verbs of the command line, and the names that they had before."""

import pytest

from atoll.__main__ import RENAMED, VERBS, main


@pytest.mark.parametrize("before", RENAMED)
def test_an_older_name_leads_to_the_verb(before: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert before not in VERBS and RENAMED[before] in VERBS
    assert main([before]) == 2
    assert f"it is called {RENAMED[before]} now" in capsys.readouterr().err
