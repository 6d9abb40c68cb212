"""What hydra_conf states for every run, without Hydra: the rest of a run that a test spells out."""

from pathlib import Path
from typing import Any

import yaml

TREE = Path(__file__).parents[1] / "hydra_conf"


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """The values over those of run.yaml, of no image and of AdamW without a warm-up."""
    stated = _content("run.yaml")
    stated |= {"image": _content("image/none.yaml"), "optimizer": group("optimizer")}
    stated["training"] |= {"steps": None, "epochs": None}  # a run says itself how long it is
    return _over(stated, values)


def group(name: str, /, **values: Any) -> dict[str, Any]:
    """One group of settings: a run's values, over those that are stated for it."""
    if name == "optimizer":
        return _content("optimizer/adamw.yaml") | {"warmup_steps": 0} | values
    stated: dict[str, Any] = _content("run.yaml")[name]
    return stated | values


def _content(file: str) -> dict[str, Any]:
    """A YAML's values, but for those that Hydra fills in."""
    content: dict[str, Any] = yaml.safe_load((TREE / file).read_text())
    return {k: v for k, v in content.items() if k != "defaults" and "${" not in str(v)}


def _over(stated: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _over(stated[key], value)
        if isinstance(value, dict) and isinstance(stated.get(key), dict)
        else value
        for key, value in values.items()
    }
    return stated | both
