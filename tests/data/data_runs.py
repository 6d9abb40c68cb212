"""Runs that differ in their data alone, and readers of what `prepare` writes."""

import hashlib
from pathlib import Path
from typing import Any

import defaults
import numpy as np

from atoll.settings import Run, checked

WORDS = ("the sea", "an island", "a reef", "of coral", "under", "waves", "and", "turtles", "sleep")


def make_run(
    folder: Path,
    data: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    **others: Any,
) -> Run:
    """A run on one laptop rank whose prepared folder lies in `folder`."""
    values: dict[str, Any] = {
        "name": "run",
        "ranks_per_node": 1,
        "folders": {"runs": folder / "runs", "prepared": folder / "prepared"},
        "facility": {"name": "here", "scheduler": "none", "node": {"devices": 1, "device": "cpu"}},
        "image": {"name": "none"},
        "launcher": {"name": "static"},
        "sharding": {"name": "single", "layouts": []},
        "model": {"name": "tiny", "config": {"model_type": "llama"}},
        "tokenizer": {"vocabulary_tokens": 300} | (tokenizer or {}),
        "data": {"name": "text", "source": "files", "validation": {"fraction": 0.2}} | (data or {}),
        "task": {"name": "causal_lm"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "precision": {"compute": "fp32"},
        "training": {"steps": 2, "global_batch_samples": 4, "microbatch_samples": 2},
        "checkpoint": {},
        "evaluation": {},
        "export": {},
        "monitor": {"communication": True, "energy": True, "progress": True},
        "generation": {},
    }
    return checked(defaults.filled(values | others))


def prose(seed: int, words: int) -> str:
    """Text of so many words; another for another seed."""
    generator = np.random.default_rng(seed)
    return " ".join(WORDS[i] for i in generator.integers(0, len(WORDS), words)) + f" {seed}."


def write_lines(path: Path, count: int, words: int = 12, seed: int = 0) -> list[str]:
    """Write a file of one document a line, and give the documents."""
    lines = [prose(seed + number, words + number % 7) for number in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return lines


def content(folder: Path) -> dict[str, str]:
    """The sha256 of every file of a folder that a reader may see, by relative name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
