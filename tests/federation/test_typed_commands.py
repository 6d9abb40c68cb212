"""What is wrong with the words of a step of a campaign is two lines, and nothing is written."""

import json
from pathlib import Path

import made_up
import pytest

from atoll import run_dir
from atoll.__main__ import main


def told(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    before = sorted(folder.rglob("*"))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2, error
    assert sorted(folder.rglob("*")) == before
    return error


@pytest.mark.parametrize("option", ["--rule", "--about"])
@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_json_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    words = ["aggregate", "--base", str(tmp_path), "--out", str(tmp_path / "out"), option, text]
    assert f"{option}: '{text[:80]}' is no JSON object" in told(words, tmp_path, capsys)


def trained(folder: Path, loss: float) -> Path:
    run_dir.write_whole(run_dir.result_file(folder), json.dumps({"steps": 1, "loss": loss}))
    run_dir.append_record(run_dir.metrics_file(folder), {"event": "train", "tokens": 8})
    return folder


def delta(folder: Path, run: Path, *more: str) -> list[str]:
    named = {"base": folder / "global-0", "run": run, "out": folder / "update"}
    named |= {"residual": folder / "residual"}
    words = [word for name, path in named.items() for word in (f"--{name}", str(path))]
    return ["make-delta", "--codec", "int8", "--about", "{}", *words, *more]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_run_whose_loss_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float
) -> None:
    made_up.first(tmp_path)
    words = delta(tmp_path, trained(tmp_path / "run", loss))
    error = told(words, tmp_path, capsys)
    assert f"is {loss}" in error and "a lower learning rate" in error


def test_a_run_that_has_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no result.json" in told(delta(tmp_path, tmp_path / "none"), tmp_path, capsys)
    run = trained(tmp_path / "run", 1.0)
    run_dir.metrics_file(run).unlink()
    assert "has no lines of training" in told(delta(tmp_path, run), tmp_path, capsys)


def test_a_fragment_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up.first(tmp_path)
    words = delta(tmp_path, trained(tmp_path / "run", 1.0), "--fragments", "2", "--fragment", "2")
    assert "fragment 2 of 2" in told(words, tmp_path, capsys)
    folder = str(tmp_path / "global-0")
    words = ["merge-global", folder, folder, str(tmp_path / "out"), "--fragments", "2"]
    words += ["--fragment-pattern", "strided", "--alpha", "0", "--merge"]
    assert "fragment 7 of 2" in told([*words, "7"], tmp_path, capsys)
