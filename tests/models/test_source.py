"""What is taken of a model of the hub, and which sources are refused."""

import pytest
from huggingface_hub.utils import filter_repo_objects

from atoll.models.source import EVERY_FILE, HUB_FILES


@pytest.mark.parametrize("patterns", [HUB_FILES, EVERY_FILE])
def test_a_model_of_the_hub_brings_its_chat_templates(patterns: tuple[str, ...]) -> None:
    templates = ["chat_template.jinja", "additional_chat_templates/tools.jinja"]
    files = [*templates, "config.json", "model.onnx"]
    taken = list(filter_repo_objects(files, allow_patterns=list(patterns)))
    assert taken == files[:-1]
