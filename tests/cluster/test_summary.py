"""A finished run says in one box what it made, and is not started again."""

import json
import sys

import pytest
import yaml

from atoll import run_dir
from atoll.__main__ import main
from atoll.cluster import start, summary
from atoll.config.compose import compose
from atoll.settings import dumped

WORDS = ("facility=laptop", "name=done", "training.steps=60")


def event(kind, **figures):
    return json.dumps({"event": kind, **figures})


@pytest.fixture
def finished(here):
    """The folder of a run that has made all that it was asked for."""
    composition = compose(WORDS)
    folder = start.write_run_folder(composition)
    steps = [
        event("train", step=step, loss=8.0 - step / 10, tokens_per_second=100.0 + step)
        for step in range(1, 61)
    ]
    steps[4] = event("train", step=5, loss=None, tokens_per_second=105.0)
    lines = [
        event("evaluation", step=0, loss=8.0, perplexity=2980.958, targets=5, seconds=0.1),
        *steps,
        event("evaluation", step=60, loss=2.0, perplexity=7.389, targets=5, seconds=0.1),
    ]
    run_dir.write_whole(run_dir.metrics_file(folder), "\n".join(lines) + "\n")
    run_dir.write_whole(run_dir.result_file(folder), json.dumps({"steps": 60, "loss": 2.0}))
    run_dir.write_whole(run_dir.sample_file(folder), "def reads_like_python():\n")
    run_dir.export(folder).mkdir()
    return folder


def test_the_box_holds_losses_speed_and_places(finished):
    lines = summary.summary(finished).splitlines()
    assert len({len(line) for line in lines}) == 1
    text = "\n".join(lines)
    assert "held-out loss        8 → 2 " in text and "held-out perplexity  2,981 → 7.389" in text
    assert "131 tokens/s over 60 steps" in text
    assert str(run_dir.export(finished)) in text and "report.html" not in text


def test_the_box_shows_a_sample_from_before_beside_the_one_from_after(finished):
    run_dir.untrained_sample_file(finished).write_text("qx zz\n\n\tww\x07 " + "y" * 99)
    lines = summary.summary(finished).splitlines()
    assert len({len(line) for line in lines}) == 1
    head, first, second = lines[-4:-1]
    assert "before training" in head and "after training" in head
    assert "│ qx zz  " in first and "│ def reads_like_python():" in first
    assert "    ww? yyyy" in second and "y…" in second


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([3.0, 2.0, 1.0], "█▅▁"), ([1.0] * 100, "▁" * 40)],
)
def test_a_sparkline_is_as_long_as_its_values_and_no_longer(values, bars):
    assert summary.sparkline(values) == bars


def test_a_finished_run_is_shown_and_not_started_again(finished, capsys, monkeypatch):
    def started(*words):
        raise AssertionError(words)

    monkeypatch.setattr(start.os, "execvp", started)
    loaded = set(sys.modules)
    more = compose([*WORDS, "training.steps=80"]).run
    run_dir.write_whole(run_dir.settings_file(finished), yaml.safe_dump(dumped(more)))
    assert not summary.is_finished(more), "its result is of fewer steps"
    run_dir.write_whole(run_dir.settings_file(finished), yaml.safe_dump(dumped(compose(WORDS).run)))
    assert main(["submit", *WORDS]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run done is finished; here is what it made\n\ndef reads_like_python")
    assert "torch" not in set(sys.modules) - loaded
    with pytest.raises(AssertionError):  # another sample is wanted
        main(["submit", *WORDS, "generation.prompt=class"])
    run_dir.sample_file(finished).unlink()
    with pytest.raises(AssertionError):
        main(["submit", *WORDS])


def test_the_last_command_of_a_run_shows_the_box(finished, capsys):
    assert main(["summary", str(finished)]) == 0
    assert capsys.readouterr().out == f"{summary.summary(finished)}\n"


def test_a_run_without_steps_has_a_box_too(here):
    folder = start.write_run_folder(compose([*WORDS[:1], "name=empty"]))
    assert "empty" in summary.summary(folder)
