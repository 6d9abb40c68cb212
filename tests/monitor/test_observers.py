"""What the loop tells its observers, in which order, and what is gone with each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_run
import torch

from atoll import run_dir
from atoll.errors import UserError
from atoll.monitor import metrics
from atoll.monitor.observers import Observer, StepRecord, WatchedRun
from atoll.settings import Run
from atoll.sharding.process_group import World
from atoll.train import train as train_module

ALONE = World(0, 1, torch.device("cpu"))
OFF = {"communication": False, "energy": False, "progress": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


def settings(folder: Path, **changes: Any) -> Run:
    node = {"devices": 8, "device": "cpu", "peak_tflops": 0.1, "device_watts": 100.0}
    sharding = small_run.sharding("single")
    return small_run.settings(folder, 1, sharding=sharding, facility__node=node, **changes)


def trained(run: Run) -> Path:
    folder = small_run.ready(run)
    small_run.train_here(ALONE, run)
    return folder


class Recorder(Observer):
    """Every call of a hook, in a line."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_step(self, step: int) -> None:
        self.calls.append(f"before {step}")

    def after_step(self, update: StepRecord) -> None:
        assert update.tokens > 0 and update.targets > 0 and float(update.loss_sum) > 0
        saved = ", saved" if update.is_saved else ""
        self.calls.append(f"after {update.step}{saved}")

    def on_checkpoint(self, step: int, save_seconds: float, blocked_seconds: float) -> None:
        assert save_seconds > 0 and blocked_seconds > 0
        self.calls.append(f"checkpoint {step}")

    def on_evaluation(self, step: int, figures: dict[str, float], seconds: float) -> None:
        assert figures["loss"] > 0 and seconds > 0
        self.calls.append(f"evaluation {step}")

    def on_end(self) -> None:
        self.calls.append("end")


def test_hooks_are_called_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    @contextmanager
    def watching(watched: WatchedRun) -> Iterator[tuple[Observer, ...]]:
        yield (recorder,)

    monkeypatch.setattr(train_module, "watching", watching)
    cadence = {"checkpoint__every_steps": 2, "checkpoint__asynchronous": False}
    trained(settings(folder, training__steps=4, evaluation__every_steps=3, **cadence))
    assert recorder.calls == [
        "evaluation 0",
        "before 1", "after 1",
        "before 2", "after 2, saved", "checkpoint 2",
        "before 3", "after 3", "evaluation 3",
        "before 4", "after 4, saved", "checkpoint 4",
        "end",
        "evaluation 4",
    ]  # fmt: skip


def test_each_observer_can_be_switched_off(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And none of them changes a loss."""
    watched = trained(settings(folder, name="watched"))
    shown = capsys.readouterr().out
    assert "step      6/6  loss" in shown and "step 6: held-out" in shown
    bare = trained(settings(folder, name="bare", monitor=OFF))
    assert "loss" not in capsys.readouterr().out
    assert small_run.losses(bare) == small_run.losses(watched)
    events = [{line["event"] for line in run_dir.metrics(one)} for one in (watched, bare)]
    assert events[0] - events[1] == {"energy"}
    assert events[1] == {"start", "train", "evaluation", "checkpoint"}
    without_profile = small_run.records(bare, "train")[-1]
    assert without_profile["communication_seconds"] is None


def test_an_observer_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"monitor\.enrgy") as error:
        settings(folder, monitor={**OFF, "enrgy": True})
    assert "monitor.energy" in error.value.hint


def test_a_device_of_unknown_peak_trains_without_mfu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "the peak of NVIDIA B200 is not known: set facility.node.peak_tflops (dense bf16)"
    monkeypatch.setattr(metrics, "peak_tflops", lambda node, device, dtype: (None, source))
    run_folder = trained(settings(folder))
    assert capsys.readouterr().out.count(source) == 1
    (start,) = small_run.records(run_folder, "start")
    assert start["peak_tflops_per_device"] is None and start["peak_source"] == source
    lines = small_run.records(run_folder, "train")
    assert len(lines) == 6 and not any("mfu" in line for line in lines)
