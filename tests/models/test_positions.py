"""Samples longer than the model's positions: refused, or scaled on request and noted."""

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.errors import UserError
from atoll.models.build import build_config, skeleton
from atoll.models.export_config import write_config
from atoll.models.weights import fill_buffers, materialize
from atoll.settings import Model

PLAIN = families.config_of("qwen3")


def scaled(kind: str, config: dict[str, Any] = PLAIN) -> Any:
    model = Model(name="x", config=config, rope_scaling={"kind": kind, "factor": 2.0})
    return build_config(model, 128, 100, {})


def test_a_sample_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(UserError, match=r"sequence_tokens \(100\) .* \(64\)") as caught:
        build_config(Model(name="x", config=PLAIN), 128, 100, {})
    assert "model.rope_scaling.kind=yarn" in caught.value.hint


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_those_of_transformers_and_noted(kind: str, tmp_path: Path) -> None:
    hf = skeleton(scaled(kind))
    materialize(hf, torch.device("cpu"))
    fill_buffers(hf)
    write_config(tmp_path, scaled(kind))
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["max_position_embeddings"] == 128
    assert stored["rope_scaling"]["rope_type"] == kind and stored["rope_scaling"]["factor"] == 2.0
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    plain = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    again = scaled(kind, stored)
    assert again.rope_parameters == config.rope_parameters, "an export is not scaled twice"
    assert again.max_position_embeddings == 128
    ours, theirs = (model.model.rotary_emb for model in (hf, plain))
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_scaling == theirs.attention_scaling


def test_phi_3s_positions_are_noted_as_older_readers_take_them(tmp_path: Path) -> None:
    """transformers 4 refuses its configuration with any other key among them."""
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    own = {"rope_scaling": {**factors}, "original_max_position_embeddings": 32}
    config = AutoConfig.for_model(**families.config_of("phi3") | own)
    rope = config.rope_parameters
    write_config(tmp_path, config)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["rope_scaling"] == factors
    assert stored["original_max_position_embeddings"] == 32
    again = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert again.rope_parameters == rope


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_what_is_scaled_already_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot be scaled again"):
        scaled("yarn", families.config_of(name))
