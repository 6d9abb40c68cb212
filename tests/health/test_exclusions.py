"""The nodes a run leaves out: a file that a person reads and edits."""

import json

import pytest

from atoll import run_dir
from atoll.__main__ import main
from atoll.errors import UserError
from atoll.health.exclusions import Exclusion, exclude, excluded, take_back

N2 = Exclusion("stalled", "rank 3 on n2: step 12: all its processes are stopped", "41", "now")


def test_what_is_excluded_is_read_back_and_says_how_to_undo_it(tmp_path):
    assert excluded(tmp_path) == {}
    exclude(tmp_path, {"n2": N2})
    exclude(tmp_path, {"n3": N2, "n2": Exclusion("died", "again", "42", "later")})
    nodes = excluded(tmp_path)
    assert nodes["n2"] == N2  # the first evidence stays
    assert list(nodes) == ["n2", "n3"]
    text = run_dir.excluded_file(tmp_path).read_text()
    assert "delete" in json.loads(text)["about"].lower()
    assert "all its processes are stopped" in text


def test_a_deleted_entry_is_no_longer_left_out(tmp_path):
    exclude(tmp_path, {"n2": N2, "n3": N2})
    file = run_dir.excluded_file(tmp_path)
    content = json.loads(file.read_text())
    del content["nodes"]["n2"]
    file.write_text(json.dumps(content))
    assert list(excluded(tmp_path)) == ["n3"]
    take_back(tmp_path, ["n3"])
    assert excluded(tmp_path) == {}
    assert not file.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"nodes": ["n2"]}'])
def test_a_slip_of_the_pen_is_told(text, tmp_path):
    run_dir.excluded_file(tmp_path).write_text(text)
    with pytest.raises(UserError, match=r"excluded\.json"):
        excluded(tmp_path)


def test_an_entry_that_a_person_adds_needs_no_evidence(tmp_path):
    run_dir.excluded_file(tmp_path).write_text('{"nodes": {"n7": {}, "n8": null}}')
    assert list(excluded(tmp_path)) == ["n7", "n8"]


def test_the_command_lists_them_and_takes_them_back(tmp_path, capsys):
    run_dir.write_whole(run_dir.settings_file(tmp_path), "")
    assert main(["exclusions", str(tmp_path)]) == 0
    assert "leaves no node out" in capsys.readouterr().out
    exclude(tmp_path, {"n2": N2, "n3": N2})
    assert main(["exclusions", str(tmp_path)]) == 0
    assert f"n2: {N2.evidence}" in capsys.readouterr().out
    assert main(["exclusions", str(tmp_path), "--take-back", "n2"]) == 0
    assert list(excluded(tmp_path)) == ["n3"]
    assert main(["exclusions", str(tmp_path), "--take-back", "n9"]) == 2
    assert "n9" in capsys.readouterr().err
