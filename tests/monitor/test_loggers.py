"""The loggers hold what metrics.jsonl holds, once, read with each library's own reader."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_run
from rank_pool import RankPool

from atoll import run_dir
from atoll.errors import UserError
from atoll.monitor import loggers
from atoll.settings import Run
from atoll.sharding.process_group import World
from atoll.train import checkpoint
from atoll.train import loop as loop_module
from atoll.train import train as train_module
from atoll.train.checkpoint_saver import CheckpointSaver

ALL = ["tensorboard", "wandb", "mlflow"]
TESTS = Path(__file__).parents[1]
SECRETS = {"SOME_TOKEN": "dont-write-me-7741", "WANDB_API_KEY": "deadbeef" * 5}
Values = dict[tuple[str, int], list[float]]  # name and step -> what was told under them


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_run.write_text(tmp_path)
    return tmp_path


def settings(folder: Path, **changes: Any) -> Run:
    node = {"devices": 8, "device": "cpu", "device_watts": 100.0}
    changes = {"loggers": ALL, "facility__node": node, "evaluation__every_steps": 2} | changes
    return small_run.settings(folder, 2, **changes)


def expected(run_folder: Path) -> Values:
    """Every figure of metrics.jsonl."""
    filed = {"train": "train", "evaluation": "held_out", "energy": "energy"}
    values: Values = {}
    for record in run_dir.metrics(run_folder):
        for name, value in record.items() if record["event"] in filed else ():
            if isinstance(value, int | float) and name not in ("step", "first_step", "time"):
                key = f"{filed[record['event']]}/{name}", record["step"]
                values.setdefault(key, []).append(float(value))
    return values


def in_tensorboard(run_folder: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_dir.tensorboard(run_folder)), {"scalars": 0})
    reader.Reload()
    values: Values = {}
    for name in reader.Tags()["scalars"]:
        for event in reader.Scalars(name):
            values.setdefault((name, event.step), []).append(event.value)
    return values


def in_wandb(run_folder: Path) -> Values:
    """Of the files of all starts, in the order in which `wandb sync` takes them."""
    values: Values = {}
    for file in sorted(run_dir.wandb(run_folder).glob("offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            row = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
            step = json.loads(row.get("_step", "-1"))
            for name, value in row.items():
                if not name.startswith("_"):
                    values.setdefault((name, step), []).append(json.loads(value))
    return values


def offline_runs(run_folder: Path) -> list[Path]:
    return list(run_dir.wandb(run_folder).glob("offline-run-*"))


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, behind seven bytes of W&B's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = file.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:  # no header fits into the rest of a block
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def in_mlflow(run_folder: Path) -> Values:
    client, run = mlflow_run(run_folder)
    values: Values = {}
    for name in run.data.metrics:
        for one in client.get_metric_history(run.info.run_id, name):
            values.setdefault((name, one.step), []).append(one.value)
    return values


def mlflow_run(run_folder: Path) -> tuple[Any, Any]:
    """MLflow's client, and the one run of the folder."""
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=run_dir.mlflow(run_folder).as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("atoll").experiment_id])
    return client, run


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}


def assert_same(got: Values, wanted: Values, name: str) -> None:
    assert got.keys() == wanted.keys(), name
    for key, values in wanted.items():
        assert len(got[key]) == 1, (name, key, "once")
        # TensorBoard has fp32
        assert got[key][-1] == pytest.approx(values[-1], rel=1e-6, abs=1e-30), (name, key)


def variables() -> dict[str, str]:
    """Those that the libraries heed."""
    return {k: v for k, v in os.environ.items() if k.startswith(("WANDB", "MLFLOW"))}


def train_with_secrets(world: World, run: Run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        before = variables()
        small_run.train_here(world, run)
        assert variables() == before


@pytest.mark.image
def test_every_sink_holds_what_metrics_hold(ranks: RankPool, folder: Path) -> None:
    run = settings(folder)
    run_folder = small_run.ready(run)
    ranks.run(train_with_secrets, run, world=2)
    wanted = expected(run_folder)
    steps = {step for name, step in wanted if name == "train/loss"}
    assert steps == {1, 2, 3, 4, 5, 6}
    assert ("held_out/perplexity", 0) in wanted and ("energy/device_joules", 6) in wanted
    for name, read in READERS.items():
        assert_same(read(run_folder), wanted, name)


def test_the_settings_go_along_and_no_secret_does(ranks: RankPool, folder: Path) -> None:
    run = settings(folder)
    run_folder = small_run.ready(run)
    ranks.run(train_with_secrets, run, world=2)
    _, told = mlflow_run(run_folder)
    assert told.info.status == "FINISHED"
    assert told.data.params["optimizer.learning_rate"] == "0.01"
    (file,) = run_dir.wandb(run_folder).glob("offline-run-*/run-*.wandb")
    configs = [r.run.config.update for r in wandb_records(file) if r.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in configs[0]}
    assert config["optimizer"]["learning_rate"] == 0.01
    written = [p.read_bytes() for p in run_folder.parent.rglob("*") if p.is_file()]
    assert len(written) > 10
    for name, secret in SECRETS.items():
        assert not any(secret.encode() in content for content in written), name


def launch(run_folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A start of the run in processes of its own."""
    paths = os.pathsep.join([str(TESTS), str(TESTS / "monitor"), *sys.path])
    words = [sys.executable, "-m", "atoll", "launch", "--fork", "2", str(run_folder), *command]
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def killed_after_step_five(run_folder: Path, placement: Any) -> int:
    """A command: train, and die with SIGKILL behind the figures of step 5, past a checkpoint."""
    from atoll.monitor.metrics import Metrics
    from atoll.train import train

    after_step = Metrics.after_step

    def and_die(metrics: Metrics, update: Any) -> None:
        after_step(metrics, update)
        if update.step == 5:
            assert checkpoint.latest(run_folder) == run_dir.checkpoint(run_folder, 3)
            os.kill(os.getpid(), signal.SIGKILL)

    Metrics.after_step = and_die  # type: ignore[method-assign]
    return train.main(run_folder, placement)


def test_a_killed_run_goes_on_in_the_same_sinks(ranks: RankPool, folder: Path) -> None:
    run = settings(folder, checkpoint__asynchronous=False)
    run_folder = small_run.ready(run)
    killed = launch(run_folder, "test_loggers:killed_after_step_five")
    assert killed.returncode != 0
    first = [path.name.split("-", 3)[3] for path in offline_runs(run_folder)]
    held = {step for name, step in in_tensorboard(run_folder) if name == "train/loss"}
    assert held == {1, 2, 3, 4, 5}, killed.stderr
    ranks.run(small_run.train_here, run, world=2)
    wanted = expected(run_folder)
    assert_same(in_tensorboard(run_folder), wanted, "tensorboard")
    assert_same(in_wandb(run_folder), wanted, "wandb")
    # MLflow keeps what the killed start told of steps 4 and 5: the same losses, its own seconds
    got = in_mlflow(run_folder)
    losses = {key for key in wanted if key[0] in ("train/loss", "held_out/loss")}
    assert_same({key: got[key] for key in losses}, {key: wanted[key] for key in losses}, "mlflow")
    assert all(len(values) == 1 for values in got.values())
    assert {name for name, _ in got.keys() ^ wanted.keys()} <= {"train/communication_seconds"}
    assert [path.name.split("-", 3)[3] for path in offline_runs(run_folder)] == first
    assert mlflow_run(run_folder)[1].info.status == "FINISHED"


def test_a_run_stopped_by_an_error_has_closed_its_sinks(ranks: RankPool, folder: Path) -> None:
    run = settings(folder)
    run_folder = small_run.ready(run)
    ranks.run(failing_at_step_four, run, world=2)
    assert mlflow_run(run_folder)[1].info.status == "FAILED"
    (offline,) = offline_runs(run_folder)
    (exit_record,) = [r for r in wandb_records(next(offline.glob("*.wandb"))) if r.HasField("exit")]
    assert exit_record.exit.exit_code == 1
    wanted = expected(run_folder)
    assert ("train/loss", 4) in wanted and ("train/loss", 5) not in wanted
    for name, read in READERS.items():
        assert_same(read(run_folder), wanted, name)
    # before the first checkpoint nothing can be resumed: all begins anew, with the loggers
    again = launch(run_folder)
    assert again.returncode == 0, again.stderr
    assert ("train/loss", 6) in expected(run_folder)
    for name, read in READERS.items():
        assert_same(read(run_folder), expected(run_folder), name)


def failing_at_step_four(world: World, run: Run) -> None:
    update = loop_module.update
    rates: list[float] = []

    def fail(train_state: Any, rate: float, judge: Any) -> Any:
        rates.append(rate)
        if len(rates) > 4:
            raise RuntimeError("stopped")
        return update(train_state, rate, judge)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(loop_module, "update", fail)
        patch.setattr(CheckpointSaver, "is_due", lambda saver, step: False)
        small_run.train_here(world, run)


def test_a_missing_library_is_said_before_the_model_is_built(ranks: RankPool, folder: Path) -> None:
    run = settings(folder)
    run_folder = small_run.ready(run)
    for found, hint in ranks.run(without_mlflow, run, world=2):
        assert found == "loggers=mlflow: its library is not installed where the ranks run"
        assert "pip install 'WHEEL[loggers]'" in hint and "\n" not in hint
    assert not run_dir.metrics_file(run_folder).exists()
    assert not run_dir.tensorboard(run_folder).exists()


def without_mlflow(world: World, run: Run) -> tuple[str, str]:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "mlflow" else find_spec(name, package)

    def assemble(*args: Any) -> Any:
        raise AssertionError("the model is being built")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as error:
        patch.setattr(importlib.util, "find_spec", find)
        patch.setattr(train_module, "assemble", assemble)
        small_run.train_here(world, run)
    return error.value.found, error.value.hint


def test_all_runs_of_a_folder_share_one_experiment(folder: Path) -> None:
    for name in ("first", "second"):
        run = settings(folder, name=name, loggers=["mlflow"])
        for step in (0, 0, 3):  # begun, begun again, resumed
            with loggers.opened(loggers.Start(run, run_dir.folder(run), step)) as log:
                log({"event": "train", "step": step + 1, "loss": 1.0})
    from mlflow.tracking import MlflowClient

    store = run_dir.mlflow(run_dir.folder(run))
    assert [path.name for path in store.parent.glob(".mlflow*")] == [".mlflow"]
    client = MlflowClient(tracking_uri=store.as_uri())
    runs = client.search_runs([client.get_experiment_by_name("atoll").experiment_id])
    assert {each.info.run_name for each in runs} == {"first", "second"} and len(runs) == 2
    assert all(each.info.artifact_uri.startswith(store.as_uri()) for each in runs)
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 4]


def test_mlflow_takes_names_of_sources_and_tasks(folder: Path) -> None:
    """Its store has a file for each figure, and none below another."""
    run = settings(folder, loggers=["mlflow"])
    figures = {"loss": 1.0, "loss/wiki": 2.0, "gsm8k/exact_match,strict-match": 0.5}
    with loggers.opened(loggers.Start(run, run_dir.folder(run), 0)) as log:
        log({"event": "evaluation", "step": 0, **figures})
        log({"event": "train", "step": 1, "loss": 1.0})
    stored = {name for name, _ in in_mlflow(run_dir.folder(run))}
    assert {"held_out/loss", "held_out/loss_wiki", "train/loss"} <= stored
    assert "held_out/gsm8k_exact_match_strict-match" in stored


def test_a_run_that_a_person_deleted_in_mlflow_goes_on_as_a_new_one(folder: Path) -> None:
    run = settings(folder, loggers=["mlflow"])
    for step in (0, 3):
        with loggers.opened(loggers.Start(run, run_dir.folder(run), step)) as log:
            log({"event": "train", "step": step + 1, "loss": 1.0})
        client, told = mlflow_run(run_dir.folder(run))
        client.delete_run(told.info.run_id)
    assert [
        metric.step for metric in client.get_metric_history(told.info.run_id, "train/loss")
    ] == [4]


def test_tensorboard_shows_settings_charts_and_samples(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = settings(folder, loggers=["tensorboard"])
    run_folder = run_dir.folder(run)
    with loggers.opened(loggers.Start(run, run_folder, 0)) as log:
        log({"event": "train", "step": 1, "loss": 1.0})
    loggers.add_samples(run, run_folder, 6, {"after training": "the reef of islands"})
    reader = EventAccumulator(str(run_dir.tensorboard(run_folder)), {"tensors": 0})
    reader.Reload()
    assert "_hparams_/session_start_info" in reader.PluginTagToContent("hparams")
    assert "custom_scalars__config__" in reader.Tags()["tensors"]
    (sample,) = reader.Tensors("sample/after training/text_summary")
    assert sample.step == 6 and b"reef of islands" in sample.tensor_proto.string_val[0]


def test_a_folder_of_the_name_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own folder has folders of these names, and may be where Python looks first."""
    (tmp_path / "wandc").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("wandc") is not None
    with pytest.raises(UserError, match="loggers=wandc: its library is not installed"):
        loggers.check_installed(["wandc"])


def broken(close_fails: bool) -> loggers.Logger:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    return loggers.Logger(fail, fail if close_fails else lambda failed: None)


def test_a_sink_that_fails_is_left_and_the_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = settings(folder, loggers=["wandb", "tensorboard"])
    run_folder = run_dir.folder(run)
    monkeypatch.setitem(loggers.LOGGERS, "wandb", lambda start: broken(close_fails=True))
    with loggers.opened(loggers.Start(run, run_folder, 0)) as log:
        for step in (1, 2):
            log({"event": "train", "step": step, "loss": float(step), "memory_gib": math.nan})
        log({"event": "communication", "step": 2, "seconds": 1.0})
    assert in_tensorboard(run_folder) == {("train/loss", 1): [1.0], ("train/loss", 2): [2.0]}
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert "logger wandb is left: OSError('disk full')" in said[0]
    assert "logger wandb was not closed well" in said[1]


def test_a_sink_that_cannot_be_opened_is_a_mistake_and_closes_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(folder, loggers=["tensorboard", "wandb"])
    closed: list[bool] = []

    def refuse(start: loggers.Start) -> loggers.Logger:
        raise RuntimeError("no room\nat all")

    good = loggers.Logger(loggers.ignore, closed.append)
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", lambda start: good)
    monkeypatch.setitem(loggers.LOGGERS, "wandb", refuse)
    start = loggers.Start(run, run_dir.folder(run), 0)
    with (
        pytest.raises(UserError, match="logger wandb cannot be opened") as error,
        loggers.opened(start),
    ):
        raise AssertionError("it was opened")
    assert "\n" not in error.value.found + error.value.hint
    assert closed == [True]


def test_names_of_sinks(folder: Path) -> None:
    assert small_run.settings(folder, 1).loggers == []
    assert small_run.settings(folder, 1, loggers="wandb").loggers == ["wandb"]
    with pytest.raises(UserError, match=r"loggers\.0 = 'wandv'") as error:
        small_run.settings(folder, 1, loggers=["wandv"])
    assert "wandb" in error.value.hint
