"""What is taken of a model of the hub, and which sources are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from huggingface_hub.utils import filter_repo_objects

from atoll.errors import UserError
from atoll.models.source import EVERY_FILE, HUB_FILES, load_config
from atoll.settings import Model


@pytest.mark.parametrize("patterns", [HUB_FILES, EVERY_FILE])
def test_a_model_of_the_hub_brings_its_chat_templates(patterns: tuple[str, ...]) -> None:
    templates = ["chat_template.jinja", "additional_chat_templates/tools.jinja"]
    files = [*templates, "config.json", "model.onnx"]
    taken = list(filter_repo_objects(files, allow_patterns=list(patterns)))
    assert taken == files[:-1]


@pytest.mark.parametrize("method", [{"quant_method": "fp8"}, {"load_in_8bit": True}])
def test_weights_that_are_stored_quantised_are_refused(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    path = tmp_path / "config.json"
    model = Model(name="x", source=str(tmp_path))
    path.write_text(json.dumps(tiny.CONFIGS["llama"] | {"quantization_config": None}))
    assert load_config(model, {}).model_type == "llama"
    path.write_text(json.dumps(tiny.CONFIGS["llama"] | {"quantization_config": method}))
    with pytest.raises(UserError, match=f"the weights of {tmp_path} are quantised") as caught:
        load_config(model, {})
    assert method.get("quant_method", "does not say") in caught.value.found
    assert "in bf16" in caught.value.hint
