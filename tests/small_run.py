"""A whole run small enough for a test: made-up text, a tiny model, prepared tokens."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import defaults
import pytest
import tiny
import yaml

from atoll import run_dir
from atoll.data.tokenize import prepare
from atoll.settings import Run, checked, dumped
from atoll.sharding.process_group import World
from atoll.train import precision
from atoll.train.train import train

# with a peak, so that not every rank of every run measures one
NODE = {"devices": 8, "device": "cpu", "peak_tflops": 0.1}
WORDS = ("the", "a", "ring", "of", "islands", "one", "lagoon", "reef", "coral", "wind", "tide")


def write_text(folder: Path) -> Path:
    """The text, by a link: what is prepared from it lies beside it, for all tests of a session."""
    path = folder / "text.txt"
    path.symlink_to(shared_text())
    return path


def shared_text(documents: int = 240) -> Path:
    """Documents of different lengths, one a line, the same each time."""
    path = Path(session_folder().name) / "text.txt"
    if not path.exists():
        source = random.Random(5)
        lines = (
            " ".join(source.choice(WORDS) for _ in range(source.randint(3, 40)))
            for _ in range(documents)
        )
        path.write_text("\n".join(lines) + "\n")
    return path


@cache
def session_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="atoll-small-run-")


def settings(folder: Path, ranks: int, **changes: Any) -> Run:
    """A run of six steps; `changes` are dotted names with __ for the dots."""
    text = (folder / "text.txt").resolve()
    values: dict[str, Any] = {
        "name": "small",
        "ranks_per_node": ranks,
        "folders": {"runs": str(folder / "runs"), "prepared": str(text.parent / "prepared")},
        "facility": {"name": "here", "scheduler": "none", "node": NODE},
        "image": {"name": "none"},
        "launcher": {"name": "static_node"},
        "sharding": sharding("full_shard"),
        "model": {"name": "llama", "config": tiny.CONFIGS["llama"] | {"vocab_size": 300}},
        "tokenizer": {"vocabulary_tokens": 290},
        "data": {
            "name": "lines",
            "source": "files",
            "files": [str(text)],
            "document": "line",
            "validation": {"fraction": 0.1},
            "sequence_tokens": 32,
            "workers": 1,
        },
        "task": {"name": "causal_lm"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-2, "warmup_steps": 2},
        "precision": {"compute": "fp32"},
        "training": {
            "steps": 6,
            "global_batch_samples": 8,
            "microbatch_samples": 2,
            "log_every_steps": 1,
        },
        "checkpoint": {"every_steps": 3},
        "evaluation": {},
        "export": {},
        "generation": {"prompt": "the reef", "max_new_tokens": 5},
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        group = values
        for part in path:
            group = group[part]
        group[last] = value
    return checked(defaults.filled(values))


def sharding(name: str) -> dict[str, Any]:
    folder = Path(__file__).parents[1] / "hydra_conf" / "sharding"
    text = (folder / f"{name}.yaml").read_text().replace("${ranks_per_node}", "2")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def ready(run: Run) -> Path:
    """Write the run folder and prepare its tokens; the folder."""
    folder = write_settings(run)
    prepare(run, lambda line: None)
    return folder


def write_settings(run: Run) -> Path:
    """Write the run folder alone; the folder."""
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    return folder


def train_here(world: World, run: Run) -> None:
    """The entrypoint that ranks of the pool run; bf16 is emulated where the processor has none."""
    with pytest.MonkeyPatch.context() as patch:
        if run.precision.compute == "bf16":
            patch.setattr(precision, "has_bf16", lambda device: True)
        train(run, run_dir.folder(run), world, lambda: 0)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, from metrics.jsonl."""
    return {r["step"]: r["loss"] for r in records(folder, "train")}


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = run_dir.metrics_file(folder).read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["event"] == event]
