"""The settings of a run that reads files: what the benchmarks of the data need."""

from pathlib import Path
from typing import Any

import yaml

from atoll.settings import Run, checked

TREE = Path(__file__).parents[1] / "hydra_conf"


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The values over what run.yaml, no image and AdamW state, without composing."""
    stated = _content("run.yaml") | {"image": _content("image/none.yaml")}
    stated |= {"optimizer": _content("optimizer/adamw.yaml") | {"warmup_steps": 0}}
    groups = {key: value for key, value in stated.items() if isinstance(value, dict)}
    return stated | values | {key: groups[key] | values.get(key, {}) for key in groups}


def _content(file: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((TREE / file).read_text())
    return {k: v for k, v in content.items() if k != "defaults" and "${" not in str(v)}


def run_on(
    folder: Path,
    files: list[Path],
    vocabulary_tokens: int,
    tokenizer: Path | None = None,
    **data: Any,
) -> Run:
    """A run whose prepared folder lies in `folder`, with a given or a trained tokenizer."""
    names = [str(file) for file in files]
    return checked(
        with_defaults(
            {
                "name": "benchmark",
                "ranks_per_node": 1,
                "folders": {"prepared": folder},
                "facility": {
                    "name": "x",
                    "scheduler": "none",
                    "node": {"devices": 1, "device": "cpu"},
                },
                "image": {"name": "none"},
                "launcher": {"name": "static"},
                "sharding": {"name": "single", "layouts": []},
                "model": {"name": "none", "config": {"model_type": "llama"}},
                "tokenizer": {
                    "path": tokenizer and str(tokenizer),
                    "vocabulary_tokens": vocabulary_tokens,
                },
                "data": {
                    "name": "benchmark",
                    "source": "files",
                    "files": names,
                    "validation": {"fraction": 0.01},
                    **data,
                },
                "task": {"name": "causal_lm"},
                "optimizer": {"name": "adamw", "learning_rate": 1e-3},
                "precision": {"compute": "fp32"},
                "training": {"steps": 1, "global_batch_samples": 1, "microbatch_samples": 1},
                "checkpoint": {},
                "evaluation": {},
                "export": {},
                "generation": {},
            }
        )
    )
