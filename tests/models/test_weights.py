"""Weights in: from seeds, from folders, whole or a slice at a time; bad folders refused."""

import json
from pathlib import Path
from typing import Any

import defaults
import pytest
import small_run
import tiny
import torch
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.errors import UserError
from atoll.models.build import build_config, build_model, weights_for
from atoll.models.safetensor_files import weight_files
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Model, Sharding, Training
from atoll.settings.axes import Axes
from atoll.sharding.layouts import BEFORE_WEIGHTS, ShardingContext, apply_layouts
from atoll.sharding.mesh import Meshes
from atoll.sharding.process_group import World
from atoll.train import assemble

CPU = torch.device("cpu")
TRAINING = Training(**defaults.group("training", global_batch_samples=1))
FULL_SHARD = Sharding(name="full_shard", layouts=["fsdp"], shard="all")


def built(settings: Model, seed: int = 0, spy: list[Any] | None = None) -> Any:
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model = build_model(config, TRAINING)
    materialize(model, CPU)
    read_into(model, settings, config, seed, spy)
    return model.hf


def read_into(model: Any, settings: Model, config: Any, seed: int, spy: list[Any] | None) -> None:
    with weights_for(settings, config, seed) as read:

        def spied(name: str, slices: Any) -> torch.Tensor:
            part = read(name, slices)
            if spy is not None:
                spy.append((name, part.numel()))
            return part

        fill(model.hf, spied)
    fill_buffers(model.hf)


def random_folder(architecture: str, folder: Path, **save: Any) -> Any:
    config = AutoConfig.for_model(**tiny.CONFIGS[architecture])
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, **save)
    return model


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_folder_gives_the_same_logits(architecture: str, shard: str, tmp_path: Path) -> None:
    theirs = random_folder(architecture, tmp_path, max_shard_size=shard)
    ours = built(Model(name="x", source=str(tmp_path)))
    tokens = tiny.batch(1).tokens_BT
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(theirs, tokens))


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "bert"])
def test_a_tied_model_can_be_untied(architecture: str, tmp_path: Path) -> None:
    """As a pipeline needs it: the head begins as the embedding, and is a parameter of its own."""
    theirs = random_folder(architecture, tmp_path)
    ours = built(Model(name="x", source=str(tmp_path), config={"tie_word_embeddings": False}))
    assert len(list(ours.parameters())) > len(list(theirs.parameters()))
    tokens = tiny.batch(1).tokens_BT
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(theirs, tokens))


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_names_of_older_files(architecture: str, tmp_path: Path) -> None:
    theirs = random_folder(architecture, tmp_path)
    prefix = theirs.base_model_prefix + "."
    old = {
        name.removeprefix(prefix)
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = built(Model(name="x", source=str(tmp_path)))
    tokens = tiny.batch(1).tokens_BT
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(theirs, tokens))


def sharded_parts(world: World, settings: Model) -> tuple[dict[str, torch.Tensor], list[Any]]:
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model = build_model(config, TRAINING)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    meshes = Meshes(Axes(1, 1, world.size, 1, 1), world.rank, mesh, mesh, None, None, None)
    apply_layouts(BEFORE_WEIGHTS, model, meshes, ShardingContext(FULL_SHARD, torch.float32, CPU))
    materialize(model, CPU)
    spy: list[Any] = []
    read_into(model, settings, config, 0, spy)
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.hf.named_parameters()
    }
    return whole, spy


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_buffers_are_where_batches_are_though_parameters_wait_in_the_host_s_memory(
    architecture: str,
) -> None:
    """The device without memory stands for one."""
    config = build_config(Model(name="x", config=tiny.CONFIGS[architecture]), 0, 32, {})
    model = build_model(config, TRAINING)
    names = [name for name, _ in model.named_buffers()]
    assert names
    materialize(model, CPU, of_buffers=torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {name: b.device.type for name, b in model.named_buffers()} == dict.fromkeys(
        names, "meta"
    )


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_random_weights_do_not_depend_on_sharding(ranks: RankPool, architecture: str) -> None:
    settings = Model(name="x", config=tiny.CONFIGS[architecture])
    alone = dict(built(settings).named_parameters())
    whole, _ = ranks.run(sharded_parts, settings, world=3)[0]
    assert whole.keys() == alone.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, alone[name]), name


@pytest.mark.parametrize(("strategy", "waits_at"), [("full_shard_offload", "cpu"), ("ddp", "meta")])
def test_offload_leaves_buffers_on_the_device(
    strategy: str, waits_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    run = small_run.settings(Path("/nowhere"), 1, sharding=small_run.sharding(strategy))
    model = build_model(build_config(run.model, tiny.VOCABULARY, tiny.SEQUENCE, {}), TRAINING)

    def placed(model: Any, device: torch.device, of_buffers: torch.device) -> None:
        places.append((device.type, of_buffers.type))

    monkeypatch.setattr(assemble, "materialize", placed)
    for name in ("check_device", "fill", "fill_buffers"):
        monkeypatch.setattr(assemble, name, lambda *_: None)
    world = World(0, 1, torch.device("meta"))
    assemble.build_sharded(run, model.hf.config, model, world, torch.float32)
    assert places == [(waits_at, "meta")]


def test_ranks_read_only_their_slices(ranks: RankPool, tmp_path: Path) -> None:
    theirs = random_folder("llama", tmp_path)
    total = sum(p.numel() for p in theirs.parameters())
    answers = ranks.run(sharded_parts, Model(name="x", source=str(tmp_path)), world=4)
    read = [sum(count for _, count in spy) for _, spy in answers]
    assert sum(read) == total
    assert max(read) < total / 2
    torch.testing.assert_close(
        answers[0][0]["lm_head.weight"], dict(theirs.named_parameters())["lm_head.weight"]
    )


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_random_weights_are_drawn_as_transformers_draws_them(architecture: str) -> None:
    config = tiny.CONFIGS[architecture] | {"vocab_size": 2000}
    torch.manual_seed(0)
    theirs = dict(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).named_parameters()
    )
    ours = dict(built(Model(name="x", config=config), seed=5).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].shape == weight.shape
        assert float(ours[name].detach().std()) == pytest.approx(
            float(weight.detach().std()), rel=0.3, abs=1e-6
        ), name
        assert float(ours[name].detach().mean()) == pytest.approx(
            float(weight.detach().mean()), abs=0.01
        ), name


def test_seed_changes_the_weights() -> None:
    settings = Model(name="x", config=tiny.CONFIGS["llama"])
    one, two = built(settings, seed=1), built(settings, seed=2)
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)


def test_tied_weights_stay_one_parameter() -> None:
    hf = built(Model(name="x", config=tiny.CONFIGS["gpt2"]))
    assert hf.lm_head.weight is hf.transformer.wte.weight


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    random_folder("llama", tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../outside.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="no plain file name"):
        weight_files(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="only safetensors are read"):
        weight_files(tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    random_folder("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        built(Model(name="x", source=str(tmp_path)))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    random_folder("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 256}))
    with pytest.raises(UserError, match=r"\(128, 32\).*\(256, 32\)"):
        built(Model(name="x", source=str(tmp_path)))


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    random_folder("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        built(Model(name="x", source=str(tmp_path)))


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_embeddings_grow_with_the_tokenizer(architecture: str, tmp_path: Path) -> None:
    """New tokens begin as the mean of the known ones; the rest stays as it was."""
    random_folder(architecture, tmp_path)
    model = Model(name="x", source=str(tmp_path))
    config = build_config(model, tiny.VOCABULARY + 3, tiny.SEQUENCE, {}, added_tokens=3)
    assert config.vocab_size == tiny.VOCABULARY + 3
    grown = build_model(config, TRAINING).hf
    materialize(grown, torch.device("cpu"))
    with weights_for(model, config, 0) as read:
        fill(grown, read)
        part = read(next(iter(dict(grown.named_parameters()))), (slice(120, 130), slice(1, 3)))
    before = built(model)
    for name, parameter in before.named_parameters():
        now = grown.get_parameter(name)
        rows = len(parameter)
        assert torch.equal(now[:rows], parameter)
        if len(now) > rows:
            expected = parameter.mean(0).expand_as(now[rows:])
            torch.testing.assert_close(now[rows:], expected)
    assert torch.equal(part, grown.get_input_embeddings().weight[120:130, 1:3])
    with pytest.raises(UserError, match="131 tokens, the model's vocabulary only 128"):
        build_config(model, tiny.VOCABULARY + 3, tiny.SEQUENCE, {}, added_tokens=2)


@pytest.mark.parametrize(
    ("settings", "vocabulary", "sequence", "found"),
    [
        (tiny.CONFIGS["llama"], 500, 32, "500 tokens, the model's vocabulary only 128"),
        (tiny.CONFIGS["llama"], 128, 65, r"65\) is more than .* \(64\)"),
        (tiny.CONFIGS["bert"] | {"is_decoder": False}, 128, 32, "only as a decoder"),
        ({"model_type": "t5", "vocab_size": 128}, 128, 32, "'t5'"),
        ({"model_type": "lama"}, 128, 32, "makes no model"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, 128, 32, r"no model.* \(1\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], vocabulary: int, sequence: int, found: str
) -> None:
    with pytest.raises(UserError, match=found):
        build_config(Model(name="x", config=settings), vocabulary, sequence, {})


def test_an_unknown_hub_name_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="nobody/nothing"):
        build_config(Model(name="x", source="nobody/nothing"), 128, 32, {})
