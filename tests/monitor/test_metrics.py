"""MFU's parts, expected traffic, and a metrics file that forgets what a resume undoes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import defaults
import numpy as np
import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from transformers import AutoConfig

from atoll import run_dir
from atoll.data.pack import PackingPlan
from atoll.errors import UserError
from atoll.models.build import build_config, build_model
from atoll.monitor import metrics, metrics_file, mfu
from atoll.monitor.comm_profile import _covered
from atoll.monitor.progress import Progress
from atoll.monitor.watch import writing
from atoll.plan.shapes import shape_of
from atoll.proof.accounting import steps_counted
from atoll.settings import Model, Node, Run, Training
from atoll.sharding.process_group import World

CPU = torch.device("cpu")


def meta(architecture: str, **changes: Any) -> Any:
    settings = Model(name="x", config=tiny.CONFIGS[architecture] | changes)
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    training = Training(**defaults.group("training", global_batch_samples=1))
    return config, build_model(config, training)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_count_the_head_once_and_no_embedding(tied: bool) -> None:
    config, _ = meta("llama", tie_word_embeddings=tied)
    d, v, layers, kv, f = 32, 128, 2, 16, 64
    matmul = layers * (2 * d * d + 2 * d * kv + 3 * d * f) + d * v
    expected = 6 * matmul + 12 * layers * d * 10.0
    assert mfu.flops_per_token(shape_of(config.to_dict()), 10.0) == pytest.approx(expected)


def test_weights_beside_adapters_count_no_gradients_of_their_own() -> None:
    config, _ = meta("llama")
    shape = shape_of(config.to_dict())
    attention = mfu.flops_per_token(shape, 10.0) - 6 * shape.multiplied_parameters
    expected = 4 * shape.multiplied_parameters + 6 * 500 + attention
    assert mfu.flops_per_token(shape, 10.0, adapters=500) == pytest.approx(expected)


def test_a_window_hides_the_far_part_of_documents_from_the_layers_that_have_one() -> None:
    """Counted one by one: a pair stands for itself and for its masked mirror image."""
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6, sliding_window=5)
    shape = shape_of(config.to_dict())
    assert (shape.window_tokens, shape.windowed_layers) == (5, 5)
    lengths = [3, 5, 12, 12]
    starts = np.cumsum([0, *lengths[:-1]])
    packing = PackingPlan(32, starts, np.array(lengths, np.int32), np.array([0, 4]))
    full = sum(n * n for n in lengths)
    near = sum(abs(q - k) < 5 for n in lengths for q in range(n) for k in range(n))
    expected = (full + 5 * near) / 6 / sum(lengths)
    assert mfu.mean_context_tokens(packing, shape) == pytest.approx(expected)


def test_a_stated_peak_is_used_and_a_processor_is_measured() -> None:
    stated = Node(devices=1, device="cuda", peak_tflops=312.0)
    assert mfu.peak_tflops(stated, CPU, torch.float32) == (312.0, "facility.node.peak_tflops")
    measured, source = mfu.peak_tflops(Node(devices=1, device="cpu"), CPU, torch.float32)
    assert measured > 0 and "measured" in source


def test_an_accelerator_of_unknown_peak_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    node, device = Node(devices=1, device="cuda"), torch.device("cuda", 0)
    peak, source = mfu.peak_tflops(node, device, torch.bfloat16)
    assert peak is None
    assert "NVIDIA B200" in source and "facility.node.peak_tflops" in source


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
    ],
)
def test_cards_of_a_family_have_peaks_of_their_own(
    name: str, tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    node, device = Node(devices=1, device="cuda"), torch.device("cuda", 0)
    assert mfu.peak_tflops(node, device, torch.bfloat16)[0] == tflops


def test_overlapping_collectives_are_counted_once() -> None:
    assert _covered([(0, 10), (2, 5), (8, 12), (20, 21)]) == 13


def test_a_resume_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    for step in (0, 5, 10, 15):
        metrics_file.append(tmp_path, {"event": "train", "step": step, "loss": float("nan")})
    metrics_file.append(tmp_path, {"event": "fault", "step": 12, "kind": "died"})
    with run_dir.metrics_file(tmp_path).open("a") as file:
        file.write('{"event": "tra')
    metrics_file.begin(tmp_path, 10)
    lines = [json.loads(line) for line in run_dir.metrics_file(tmp_path).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 5, 10, 12]
    assert lines.pop()["event"] == "fault", "what went wrong is not forgotten"
    assert lines[0]["loss"] is None, "JSON has no NaN"


def test_energy_that_was_spent_stays_where_a_run_goes_back(tmp_path: Path) -> None:
    spent = {"event": "energy", "first_step": 1, "device_joules": 5.0}
    for step in (5, 15):
        metrics_file.append(tmp_path, {"event": "train", "step": step})
    metrics_file.append(tmp_path, spent | {"step": 15})
    metrics_file.begin(tmp_path, 10)
    metrics_file.append(tmp_path, spent | {"step": 20, "first_step": 11})
    lines = run_dir.metrics(tmp_path)
    assert [line["step"] for line in lines] == [5, 10, 20]
    assert steps_counted(lines) == 20 and lines[1]["device_joules"] == 5.0


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total_steps=20, first_step=0)
    progress.before_step(1)
    progress.show({"event": "train", "step": 10, "loss": 1.5, "tokens_per_second": 1234.5})
    assert capsys.readouterr().out.split() == [
        "step", "10/20", "loss", "1.5000", "1,234", "tokens/s", "0:00", "left",
    ]  # fmt: skip
    progress.show({"event": "energy", "step": 10, "seconds": 1.0})
    assert capsys.readouterr().out == ""
    progress.on_evaluation(10, {"loss": 1.5, "targets": 7, "perplexity": 4.4817}, seconds=1.0)
    assert capsys.readouterr().out == "step 10: held-out perplexity 4.482 (loss 1.5000)\n"


@pytest.mark.login_node
def test_a_full_disk_while_lines_are_written_is_two_lines(tmp_path):
    watched = SimpleNamespace(
        world=SimpleNamespace(rank=0),
        run=SimpleNamespace(loggers=[]),
        run_folder=tmp_path,
        resumed_step=7,
    )
    with writing(watched, None) as write:
        run_dir.metrics_file(tmp_path).symlink_to("/dev/full")
        with pytest.raises(UserError, match="No space left on device") as error:
            write({"event": "train", "step": 8})
    assert "it resumes" in error.value.hint


def train_with_more_on_the_last_rank(world: World, run: Run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "memory_gib", lambda device: 1.0 + world.rank)
        small_run.train_here(world, run)


def test_the_memory_of_a_line_is_that_of_the_fullest_rank(ranks: RankPool, tmp_path: Path) -> None:
    small_run.write_text(tmp_path)
    run = small_run.settings(tmp_path, 2, training__steps=2)
    folder = small_run.ready(run)
    ranks.run(train_with_more_on_the_last_rank, run, world=2)
    assert [line["memory_gib"] for line in small_run.records(folder, "train")] == [2.0, 2.0]
