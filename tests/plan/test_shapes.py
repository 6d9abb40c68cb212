"""Numbers of parameters in closed form against the models themselves; axes that do not divide."""

from dataclasses import replace
from typing import Any

import defaults
import families
import pytest
import tiny
from transformers import AutoConfig

from atoll.errors import UserError
from atoll.models.build import build_config, build_model
from atoll.models.parts import blocks_of
from atoll.plan.decoders import window_of
from atoll.plan.shapes import check_architecture, known_config, shape_of
from atoll.settings import Model, Sharding, Training

TRAINING = Training(**defaults.group("training", global_batch_samples=1))
CHANGES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"attention_bias": True},
        {"mlp_bias": True, "head_dim": 4},
    ],
    "gpt2": [{}, {"tie_word_embeddings": False}, {"n_inner": 96}],
    "opt": [{}, {"word_embed_proj_dim": 32}, {"tie_word_embeddings": False}],
    "bert": [{}, {"tie_word_embeddings": False}],
}


@pytest.mark.parametrize(
    ("family", "changes"), [(f, change) for f, every in CHANGES.items() for change in every]
)
def test_parameters_are_those_of_the_model(family: str, changes: dict[str, Any]) -> None:
    settings = Model(name="x", config=tiny.CONFIGS[family] | changes)
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model = build_model(config, TRAINING)
    shape = shape_of(config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    blocks = blocks_of(model.hf, model.parts)
    assert shape.layers == len(blocks)
    assert shape.block_parameters == sum(p.numel() for p in blocks[0].parameters())
    assert shape == shape_of(settings.config), "the same from what a login node knows"


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_decoder_has_the_parameters_of_its_shape(name: str) -> None:
    settings = Model(name="x", config=families.config_of(name))
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model, shape = build_model(config, TRAINING), shape_of(config.to_dict())
    blocks = blocks_of(model.hf, model.parts)
    assert shape.block_parameters == sum(p.numel() for p in blocks[0].parameters())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape == shape_of(settings.config), "the same from what a login node knows"


def test_published_models_have_their_published_sizes() -> None:
    assert shape_of({"model_type": "gpt2"}).parameters == 124_439_808
    assert shape_of({"model_type": "opt"}).parameters == 125_239_296
    assert shape_of({"model_type": "llama"}).parameters == 6_738_415_616


@pytest.mark.parametrize(
    ("family", "sharding", "found"),
    [
        ("llama", {"tensor": 3}, r"attention heads \(4\) cannot be divided by .* \(3 x 1\)"),
        ("llama", {"context": 4}, r"key and value heads \(2\)"),
        ("llama", {"pipeline": 3}, "2 layers, the pipeline 3 stages"),
        ("llama", {"pipeline": 2, "stages_per_rank": 2}, "2 layers, the pipeline 4 stages"),
        ("gpt2", {"tensor": 2}, "query, key and value in one transposed matrix"),
    ],
)
def test_what_cannot_be_divided_is_refused(family: str, sharding: Any, found: str) -> None:
    spread = Sharding(name="x", layouts=["fsdp"], shard="all", **sharding)
    with pytest.raises(UserError, match=found):
        check_architecture(shape_of(tiny.CONFIGS[family]), spread)


def test_a_configuration_is_found_in_a_folder_and_in_the_cache(tmp_path: Any) -> None:
    text = '{"model_type": "gpt2", "n_layer": 3}'
    (tmp_path / "config.json").write_text(text)
    folder = Model(name="x", source=str(tmp_path), config={"n_head": 2})
    assert known_config(folder, {}) == {"model_type": "gpt2", "n_layer": 3, "n_head": 2}
    cached = tmp_path / "hub" / "models--a--b" / "snapshots" / "0"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text(text)
    environment = {"HF_HOME": str(tmp_path)}
    assert known_config(Model(name="x", source="a/b"), environment) == {
        "model_type": "gpt2",
        "n_layer": 3,
    }
    assert known_config(Model(name="x", source="c/d"), environment) is None


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral"}, (4096, 12)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0)),
        ({"model_type": "gemma2"}, (4096, 6)),
        ({"model_type": "gemma3_text", "sliding_window": 512}, (512, 10)),
        ({"model_type": "phi3", "sliding_window": 2047}, (2047, 12)),
        ({"model_type": "qwen2", "sliding_window": 99, "use_sliding_window": False}, (0, 0)),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, (128, 6)),
        ({"model_type": "llama"}, (0, 0)),
    ],
)
def test_windows_are_found_as_they_are_written_and_as_they_are_loaded(
    config: dict[str, Any], window: tuple[int, int]
) -> None:
    config = config | {"num_hidden_layers": 12}
    loaded = AutoConfig.for_model(**config).to_dict()
    written = loaded if config["model_type"] == "gpt_oss" else config
    assert window_of(loaded, 12) == window_of(written, 12) == window


def test_a_model_cut_short_has_no_more_windows_than_layers() -> None:
    config = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 18}
    assert window_of(config, 2) == (5, 2)


def test_a_plan_counts_no_work_outside_windows() -> None:
    """The pairs of a sequence, one by one, each beside its masked mirror image."""
    shape = shape_of(tiny.CONFIGS["llama"])
    windowed = replace(shape, window_tokens=16, windowed_layers=1)
    near = sum(abs(q - k) < 16 for q in range(64) for k in range(64))
    assert shape.attended_tokens(64) == 64
    assert windowed.attended_tokens(64) == pytest.approx((64 + near / 64) / 2)
    assert windowed.attended_tokens(9) == 9
