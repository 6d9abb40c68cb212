"""What a run says it was made of."""

import json
from pathlib import Path

import pytest
import small_run

from atoll import run_dir
from atoll.monitor import provenance as made_of


def test_names_and_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run.write_text(tmp_path)
    run = small_run.settings(tmp_path, 1)
    small_run.ready(run)
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps({"atoll.lock": "abc", "atoll.source": "def", "other": "1"}))
    monkeypatch.setattr(made_of, "LABELS", labels)
    found = made_of.made_of(run)
    manifest = run_dir.sha256_of(run_dir.prepared(run) / "manifest.json")
    assert found["data"] == f"lines {manifest[:16]}"
    assert (found["image"], found["lock"], found["source"]) == ("none", "abc", "def")
    assert "torch " in found["libraries"] and found["tokenizer"].startswith("made for it ")
    tokenizer = run_dir.prepared(run) / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert made_of.made_of(run)["tokenizer"] != found["tokenizer"]


def test_outside_an_image_there_are_no_labels(tmp_path: Path) -> None:
    assert made_of._of_image(tmp_path / "labels.json") == {}
    assert made_of._commit(tmp_path) == ""
