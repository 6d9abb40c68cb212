"""The command line: each verb has its function, and a verb's old name leads to its new one."""

import importlib.util
import os
import subprocess
import sys

import pytest

from atoll.__main__ import RENAMED, VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_a_module(verb):
    assert importlib.util.find_spec(VERBS[verb][0].partition(":")[0])


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_verb_is_refused_with_its_new_name(old, new, capsys):
    assert new in VERBS and old not in VERBS
    assert main([old, "x"]) == 2
    found, hint = capsys.readouterr().err.splitlines()
    assert found == f"atoll: unknown verb: {old}"
    assert hint.strip() == f"it is called {new} now"


@pytest.mark.parametrize("verb", ["compose", "submit", "status", "doctor", "plan", "evaluate"])
def test_help_shows_usage_and_options(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_word_that_is_no_verb(capsys):
    assert main(["repport"]) == 2
    assert "unknown verb: repport" in capsys.readouterr().err


def test_a_pythonpath_that_shadows_yaml_does_not_reach_the_console_script(tmp_path):
    (tmp_path / "yaml.py").write_text("raise RuntimeError('not this one')")
    script = "import sys; from atoll.__main__ import entry; entry()"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", script, "status", str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stderr.startswith(f"atoll: no run at {tmp_path}"), done.stderr
