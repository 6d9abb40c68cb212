"""Adapters begin as no change, learn alone, and are merged into what they were beside."""

import json
import re
from pathlib import Path
from typing import Any

import defaults
import families
import pytest
import tiny
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from atoll.errors import UserError
from atoll.models import adapter
from atoll.models.build import build_config, build_model, classifier_config, weights_for
from atoll.models.nf4 import fill_packed
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Classes, Lora, Model, Training

CPU = torch.device("cpu")
MIXTURES = ("mixtral", "qwen3_moe")
TRAINING = Training(**defaults.group("training", global_batch_samples=1))


def adapted(folder: Path, model: Model) -> Any:
    config = build_config(model, tiny.VOCABULARY, tiny.SEQUENCE, {})
    return filled_with_adapters(build_model(config, TRAINING), model, config)


def filled_with_adapters(built: Any, model: Model, config: Any) -> Any:
    adapter.adapt(built.hf, model)
    shapes = {name: tuple(p.shape) for name, p in built.hf.named_parameters()}
    with weights_for(model, config, 0) as read:
        read = adapter.adapted_reader(read, 0, shapes, model.lora)
        adapter.fill_int8(built.hf, read, CPU)
        materialize(built, CPU)
        fill(built.hf, read, fill_packed(built.hf, read, CPU))
        fill_buffers(built.hf)
    return built.hf


def saved(architecture: str, folder: Path, **changes: Any) -> Any:
    torch.manual_seed(7)
    sizes = families.config_of(architecture) if architecture in MIXTURES else None
    config = AutoConfig.for_model(**((sizes or tiny.CONFIGS[architecture]) | changes))
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(folder)
    return theirs.eval()


@pytest.mark.image
@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_an_adapter_is_no_change_until_it_learns(tmp_path: Path, architecture: str) -> None:
    theirs = saved(architecture, tmp_path)
    hf = adapted(tmp_path, Model(name="x", source=str(tmp_path), lora=Lora(rank=2)))
    tokens = tiny.batch(1).tokens_BT
    with torch.no_grad():
        torch.testing.assert_close(hf.eval()(tokens).logits, theirs(tokens).logits)
    learning = [name for name, p in hf.named_parameters() if p.requires_grad]
    assert learning and all(".lora_" in name for name in learning)


@pytest.mark.parametrize(
    ("architecture", "quantisation", "alpha"),
    [
        *((name, "none", 4.0) for name in (*tiny.CONFIGS, *MIXTURES)),
        ("llama", "none", 8.5),
        ("llama", "nf4", 4.0),
        ("llama", "int8", 4.0),
    ],
)
def test_a_merged_adapter_answers_as_the_two_parts_did(
    tmp_path: Path, architecture: str, quantisation: Any, alpha: float
) -> None:
    theirs = saved(
        architecture, tmp_path, **({"hidden_size": 64} if quantisation != "none" else {})
    )
    model = Model(
        name="x", source=str(tmp_path), lora=Lora(rank=2, alpha=alpha), quantisation=quantisation
    )
    hf = adapted(tmp_path, model)
    torch.manual_seed(1)
    for name, parameter in hf.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.2)
    assert model.lora is not None
    plain = adapter.merged(hf, model.lora, dict(hf.named_parameters()))
    state = {name: adapter.full_tensor(parameter) for name, parameter in plain.items()}
    assert set(state) == {name for name, _ in theirs.named_parameters()}
    if quantisation == "none":  # from files, a matrix at a time: the same bits
        learned = adapter.gathered_adapter(dict(hf.named_parameters()))
        adapter.write_adapter(tmp_path / "adapter", model, learned)
        stored = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
        lora, folder = model.lora, tmp_path / "adapter"
        read = adapter.merging_reader(lambda name, _: stored[name], theirs, lora, folder)
        assert all(torch.equal(read(name, ()), tensor) for name, tensor in state.items())
    theirs.load_state_dict(state, strict=False)
    tokens = tiny.batch(1).tokens_BT
    with torch.no_grad():
        two, one = hf.eval()(tokens).logits, theirs(tokens).logits
    # int8 also rounds what is multiplied with the weights; nf4 multiplies in half precision
    tolerance = {"none": 1e-4, "nf4": 5e-3, "int8": 5e-2}[quantisation]
    torch.testing.assert_close(two, one, atol=tolerance, rtol=0)


@pytest.mark.image
def test_quantised_weights_take_less_and_are_near(tmp_path: Path) -> None:
    theirs = saved("llama", tmp_path, hidden_size=64)
    hf = adapted(
        tmp_path, Model(name="x", source=str(tmp_path), lora=Lora(rank=2), quantisation="nf4")
    )
    layer = hf.get_submodule("model.layers.0.mlp.up_proj.base_layer")
    wide = theirs.get_submodule("model.layers.0.mlp.up_proj").weight
    assert layer.weight.numel() * layer.weight.element_size() <= wide.numel() / 2
    near = adapter._dequantised(layer, layer.weight)
    assert float((near - wide).detach().norm() / wide.detach().norm()) < 0.12


def test_training_goes_on_with_an_adapter_that_is_given(tmp_path: Path) -> None:
    saved("llama", tmp_path / "base")
    model = Model(name="x", source=str(tmp_path / "base"), lora=Lora(rank=2, freeze_a=True))
    hf = adapted(tmp_path, model)
    learning = [name for name, p in hf.named_parameters() if p.requires_grad]
    assert learning and all(".lora_B." in name for name in learning)
    torch.manual_seed(1)
    for name, parameter in hf.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    tensors = adapter.gathered_adapter(dict(hf.named_parameters()))
    adapter.write_adapter(tmp_path / "adapter", model, tensors)
    lora = Lora(rank=2, start=tmp_path / "adapter")
    again = adapted(tmp_path, model.model_copy(update={"lora": lora}))
    after = adapter.gathered_adapter(dict(again.named_parameters()))
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())
    for changes, found in (
        ({"rank": 3}, r"has \(2, 32\) for .*lora_A.*, the model \(3, 32\)"),
        ({"alpha": 8.0}, "was made with lora_alpha=32, model.lora.alpha is 8"),
        ({"targets": ["q_proj"]}, r"has base_model.*down_proj.* and \d+ others that are not in"),
    ):
        with pytest.raises(UserError, match=found):
            adapted(tmp_path, model.model_copy(update={"lora": lora.model_copy(update=changes)}))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"use_dora": True}, "was made with use_dora=True"),
        ({"alpha_pattern": {"q_proj": 80}}, "was made with alpha_pattern={'q_proj': 80}"),
        ({"rank_pattern": {"q_proj": 1}}, "was made with rank_pattern="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"peft_type": "ADALORA"}, "peft_type=ADALORA"),
        ({"lora_alpha": None}, "is no adapter's settings"),
        ({"lora_alpha": "many"}, "is no adapter's settings"),
        (None, "is no adapter's settings"),
    ],
)
def test_adapters_of_other_kinds_are_no_start(
    tmp_path: Path, changes: dict[str, Any] | None, found: str
) -> None:
    saved("llama", tmp_path / "base")
    model = Model(name="x", source=str(tmp_path / "base"), lora=Lora(rank=2))
    hf = adapted(tmp_path, model)
    tensors = adapter.gathered_adapter(dict(hf.named_parameters()))
    adapter.write_adapter(tmp_path / "adapter", model, tensors)
    lora = Lora(rank=2, start=tmp_path / "adapter")
    adapted(tmp_path, model.model_copy(update={"lora": lora}))
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = [] if changes is None else json.loads(path.read_text()) | changes
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=re.escape(found)):
        adapted(tmp_path, model.model_copy(update={"lora": lora}))
    path.unlink()
    save_file(
        tensors | {"base_model.model.lm_head.weight": torch.ones(1)}, path.with_name(adapter.FILE)
    )
    with pytest.raises(UserError, match=r"has base_model.model.lm_head.weight and 0 others"):
        adapted(tmp_path, model.model_copy(update={"lora": lora}))


def test_widths_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(UserError, match="a matrix is 32 wide"):
        adapted(
            tmp_path, Model(name="x", source=str(tmp_path), lora=Lora(rank=2), quantisation="nf4")
        )


@pytest.mark.image
@pytest.mark.parametrize(
    ("architecture", "alpha"), [("llama", 4.0), ("llama", 8.5), *((name, 4.0) for name in MIXTURES)]
)
def test_the_adapter_alone_is_loaded_by_peft(
    tmp_path: Path, architecture: str, alpha: float
) -> None:
    from peft import PeftModel

    theirs = saved(architecture, tmp_path / "base")
    model = Model(name="x", source=str(tmp_path / "base"), lora=Lora(rank=2, alpha=alpha))
    hf = adapted(tmp_path, model)
    for name, parameter in hf.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.2)
    tensors = adapter.gathered_adapter(dict(hf.named_parameters()))
    adapter.write_adapter(tmp_path / "adapter", model, tensors)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == alpha
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    wide = {"gate_proj", "up_proj", "down_proj"} if architecture == "llama" else set()
    assert set(settings["target_modules"]) == attention | wide
    loaded = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    tokens = tiny.batch(1).tokens_BT
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, hf.eval()(tokens).logits)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
@pytest.mark.parametrize("quantisation", ["none", "int8"])
def test_a_classifier_s_adapter_is_loaded_by_peft(
    tmp_path: Path, architecture: str, quantisation: Any
) -> None:
    """Its head is new: it learns whole, stays as it is stored, and goes with the adapter."""
    from peft import PeftModel

    sizes = tiny.CONFIGS[architecture] | {"num_labels": 3, "is_decoder": False, "hidden_size": 64}
    torch.manual_seed(7)
    base = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**sizes))
    base.base_model.save_pretrained(tmp_path / "base")
    lora = Lora(rank=2, targets=["q_proj", "query"])
    model = Model(
        name="x", source=str(tmp_path / "base"), lora=lora, quantisation=quantisation,
        config={"is_decoder": False},
    )  # fmt: skip
    classes = Classes(text_fields=["text"], labels=["a", "b", "c"])
    config = classifier_config(model, classes, tiny.VOCABULARY, tiny.SEQUENCE, 1)
    hf = filled_with_adapters(build_model(config, TRAINING), model, config)
    head = {"llama": "score", "bert": "classifier"}[architecture]
    learning = {name for name, p in hf.named_parameters() if p.requires_grad}
    assert {name for name in learning if ".lora_" not in name} == {
        name for name, _ in hf.named_parameters() if name.startswith(head + ".")
    }
    for name, parameter in hf.named_parameters():
        if name in learning:
            nn.init.normal_(parameter, std=0.2)
    parameters = dict(hf.named_parameters())
    adapter.write_adapter(
        tmp_path / "adapter", model, adapter.gathered_adapter(parameters, head), head
    )
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", [head])
    if quantisation != "none":
        return
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    loaded = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    loaded.config.pad_token_id = 0
    hf.config.pad_token_id = 0
    tokens = tiny.batch(1).tokens_BT
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, hf.eval()(tokens).logits)


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_that_would_learn_nothing_is_refused(tmp_path: Path, end: str) -> None:
    """The loss and the embedding read the weight itself, past the layer that has the adapter."""
    saved("llama", tmp_path)
    lora = Lora(rank=2, targets=["q_proj", end])
    with pytest.raises(UserError, match=f"targets names {end}") as refused:
        adapted(tmp_path, Model(name="x", source=str(tmp_path), lora=lora))
    assert f"leave {end} out" in refused.value.hint


def test_targets_that_are_not_there_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(UserError, match=r"model\.lora\.targets fits no layer"):
        adapted(tmp_path, Model(name="x", source=str(tmp_path), lora=Lora(targets=["q_prog"])))


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["q_proj", "gate"]])
def test_adapters_of_experts_are_refused(tmp_path: Path, targets: list[str]) -> None:
    """They are parameters: nothing would merge what they learn."""
    saved("qwen3_moe", tmp_path)
    with pytest.raises(UserError, match="names experts or a router") as refused:
        adapted(tmp_path, Model(name="x", source=str(tmp_path), lora=Lora(targets=targets)))
    assert "[q_proj,k_proj,v_proj,o_proj]" in refused.value.hint


def test_a_device_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.check_device("nf4", CPU)

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(adapter, "quantised", fail)
    with pytest.raises(UserError, match="does not work on this cpu: RuntimeError: no kernel"):
        adapter.check_device("nf4", CPU)
