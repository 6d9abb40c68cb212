"""Rows with labels through the whole trainer: the same losses however gradients are averaged."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from test_train import stop_after
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from atoll import run_dir
from atoll.errors import UserError
from atoll.settings import Run
from atoll.train.tasks import TASKS

WAYS = {"single": 1, "gather_scatter": 4, "all_reduce": 4, "ddp": 4, "full_shard": 4}
COLOURS = ("red", "blue", "green", "white")
CONFIG = {
    "vocab_size": 300,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "is_decoder": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of texts: does the second name the colour of the first?"""
    path = tmp_path_factory.mktemp("rows")
    source = random.Random(3)
    for name, count in (("train", 96), ("held_out", 41)):
        lines = []
        for _ in range(count):
            one, other = source.choice(COLOURS), source.choice(COLOURS)
            row = {"a": f"the {one} reef", "b": f"it is {other}", "same": int(one != other)}
            lines.append(json.dumps(row))
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return path


def settings(folder: Path, way: str, **changes: Any) -> Run:
    data = {
        "name": "colours",
        "source": "files",
        "files": [str(folder / "train.jsonl")],
        "classes": {
            "text_fields": ["a", "b"],
            "label_field": "same",
            "labels": ["same", "other"],
            "metrics": ["accuracy", "f1", "matthews"],
        },
        "batching": "padding",
        "validation": {"files": [str(folder / "held_out.jsonl")]},
        "sequence_tokens": 16,
        "workers": 1,
    }
    values = {
        "sharding": small_run.sharding(way),
        "task": {"name": "classification"},
        "data": data,
        "tokenizer": {"kind": "wordpiece", "vocabulary_tokens": 280},
        "model": {"name": "bert", "config": tiny.CONFIGS["bert"] | CONFIG},
        "training": {
            "epochs": 2,
            "global_batch_samples": 16,
            "microbatch_samples": 4,
            "log_every_steps": 1,
        },
        "evaluation": {"every_epochs": 1},
        "export": {"dtype": "float32"},
        "name": f"way-{way}",
    }
    return small_run.settings(folder, WAYS[way], **values | changes)


@pytest.fixture(scope="module")
def runs(ranks: RankPool, folder: Path) -> dict[str, Path]:
    found = {}
    for way, world in WAYS.items():
        run = settings(folder, way)
        found[way] = small_run.ready(run)
        ranks.run(small_run.train_here, run, world=world)
    return found


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_losses_do_not_depend_on_how_gradients_are_averaged(
    runs: dict[str, Path], way: str
) -> None:
    """With dropout: a microbatch draws the same whoever has it."""
    alone, spread = (small_run.losses(runs[name]) for name in ("single", way))
    assert len(alone) == 12
    assert spread == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_metrics_follow_every_epoch_and_count_each_row_once(
    runs: dict[str, Path], way: str
) -> None:
    found = small_run.records(runs[way], "evaluation")
    assert [record["step"] for record in found] == [0, 6, 12]
    assert all(record["targets"] == 41 for record in found)
    expected = small_run.records(runs["single"], "evaluation")[-1]
    for name in ("loss", "accuracy", "f1", "matthews"):
        assert found[-1][name] == pytest.approx(expected[name], abs=1e-5)


def test_the_export_gives_the_same_labels(runs: dict[str, Path], folder: Path) -> None:
    export = run_dir.export(runs["ddp"])
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    inputs = tokenizer(
        [row["a"] for row in rows], [row["b"] for row in rows], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        predictions = model(**inputs).logits.argmax(1)
    right = sum(int(label) == row["same"] for label, row in zip(predictions, rows, strict=True))
    last = small_run.records(runs["ddp"], "evaluation")[-1]
    assert right / len(rows) == pytest.approx(last["accuracy"])
    assert model.config.id2label == {0: "same", 1: "other"}


def test_a_stopped_run_goes_on_with_the_same_losses(
    ranks: RankPool, runs: dict[str, Path], folder: Path
) -> None:
    run = settings(folder, "full_shard", checkpoint={"every_steps": 0})
    run = run.model_copy(update={"name": "stopped"})
    run_folder = small_run.ready(run)
    ranks.run(stop_after, run, 5)
    ranks.run(small_run.train_here, run)
    expected = small_run.losses(runs["full_shard"])
    assert small_run.losses(run_folder) == pytest.approx(expected, abs=1e-5)


def test_a_head_of_another_number_of_labels_is_evaluated_by_nobody(
    ranks: RankPool, runs: dict[str, Path], folder: Path
) -> None:
    """It would begin at random: that is for a run that trains."""
    changes = {
        "name": "third",
        "model": {"name": "bert", "source": str(run_dir.export(runs["ddp"]))},
        "data__classes__labels": ["same", "other", "none"],
        "data__classes__metrics": ["accuracy", "f1"],
        "training__epochs": None,
    }
    said = r"the classifier of .* has 2 labels, the data 3"
    for steps in (0, 1):
        run = settings(folder, "single", **changes, training__steps=steps)
        run_folder = small_run.ready(run)
        if steps == 0:
            with pytest.raises(AssertionError, match=said):
                ranks.run(small_run.train_here, run, world=1)
        else:
            ranks.run(small_run.train_here, run, world=1)
            assert run_dir.export(run_folder).is_dir()


def test_figures_of_labels_are_refused_for_scores(folder: Path) -> None:
    with pytest.raises(UserError, match=r"metrics has accuracy, f1, matthews, and .*labels is emp"):
        settings(folder, "single", data__classes__labels=[])


def test_half_precision_tells_labels_beyond_256_apart(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    """Of these bf16 has every second number alone: what is learned is what is evaluated."""
    for name in ("train", "held_out"):
        rows = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        lines = [json.dumps(row | {"same": 257}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    classes = {
        "data__classes__labels": [f"label {number}" for number in range(300)],
        "data__classes__metrics": ["accuracy"],
    }
    changes = {"precision__compute": "bf16", "optimizer__learning_rate": 3e-2}
    run = settings(tmp_path, "full_shard", **classes, **changes)
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run)
    found = small_run.records(run_folder, "evaluation")
    assert [record["accuracy"] for record in found] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("labels", "told", "outputs", "expected"),
    [
        (["a", "b"], [0, 1, 1, 0], [[2, 1], [0, 1], [3, 1], [5, 0]], (0.75, 2 / 3, 1 / 3**0.5)),
        (
            ["a", "b", "c"],
            [0, 1, 2, 2],
            [[2, 1, 0], [0, 1, 0], [0, 0, 3], [5, 0, 0]],
            (0.75, 7 / 9, 0.7),
        ),
        ([], [1.0, 2.0, 3.0, 4.0], [[1.0], [4.0], [9.0], [16.0]], (0.9843740387, 1.0)),
    ],
)
def test_metrics_of_labels_and_of_scores(
    folder: Path, labels: list[str], told: list[float], outputs: Any, expected: tuple[float, ...]
) -> None:
    """Worked out by hand: one of two found, nothing found that is not there; squares in order."""
    names = ("accuracy", "f1", "matthews") if labels else ("pearson", "spearman")
    run = settings(folder, "single")
    assert run.data.classes is not None
    classes = run.data.classes.model_copy(update={"labels": labels, "metrics": list(names)})
    run = run.model_copy(update={"data": run.data.model_copy(update={"classes": classes})})
    logits, classes_N = torch.tensor(outputs, dtype=torch.float32), torch.tensor(told)
    found = TASKS["classification"].figures(run, 0.0, logits, classes_N)
    assert found == pytest.approx(dict(zip(names, expected, strict=True)))
