"""Every decoder against transformers' own: the loss, all gradients, and packed documents."""

import copy
from typing import Any

import defaults
import families
import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.data.batch import Batch
from atoll.errors import UserError
from atoll.models import attention, causal_lm, self_check
from atoll.models.build import build_config, build_model, weights_for
from atoll.models.causal_lm import CausalLM
from atoll.models.parts import blocks_of
from atoll.models.self_check import TRIED
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Model, Training
from atoll.sharding.expert import experts_of

CASES = [
    name if name in families.OF_EACH_KIND else pytest.param(name, marks=pytest.mark.full)
    for name in families.FAMILIES
]
NEAR = {"atol": 1e-5, "rtol": 1e-5}


def both(name: str, **changes: Any) -> tuple[CausalLM, Any]:
    """Ours, and transformers' with eager attention and the same parameters."""
    settings = Model(name="tiny", config=families.config_of(name) | changes)
    training = Training(**defaults.group("training", global_batch_samples=1, loss_chunk_tokens=24))
    config = build_config(settings, families.VOCABULARY, tiny.SEQUENCE, {})
    model = build_model(config, training)
    materialize(model, torch.device("cpu"))
    with weights_for(settings, config, 0) as read:
        fill(model.hf, read)
    fill_buffers(model.hf)
    plain = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    )
    assert model.hf.config._attn_implementation == attention.NAME
    with torch.no_grad():
        for parameter, own in zip(plain.parameters(), model.hf.parameters(), strict=True):
            own.add_(torch.randn(own.shape) * 0.02)  # norms that are not 1, biases that are not 0
            parameter.copy_(own)
    return model, plain.train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    model, plain = both(name)
    tokens = torch.randint(3, families.VOCABULARY, (2, tiny.SEQUENCE))
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    positions = torch.arange(tiny.SEQUENCE).expand(2, -1)
    ends = torch.tensor([0, tiny.SEQUENCE, 2 * tiny.SEQUENCE], dtype=torch.int32)
    lengths = (tiny.SEQUENCE, tiny.SEQUENCE)
    batch = Batch(tokens, labels, positions, ends, lengths, tokens.numel())
    ours = model(batch, torch.float32) / (labels != -100).sum()
    theirs = plain(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(ours, theirs, **NEAR)
    ours.backward()
    theirs.backward()
    expected = gradients(plain)
    assert gradients(model.hf).keys() == expected.keys()
    for parameter, gradient in gradients(model.hf).items():
        torch.testing.assert_close(gradient, expected[parameter], **NEAR, msg=parameter)


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_are_those_alone(name: str) -> None:
    """The balance of experts is of a whole batch, so it is left out here."""
    balance = (
        {"output_router_logits": False}
        if "output_router_logits" in families.config_of(name)
        else {}
    )
    model, plain = both(name, **balance)
    batch = tiny.batch(5, samples=2)
    pieces = batch.tokens_BT.flatten().split(batch.segment_lengths)
    alone = sum(
        torch.nn.functional.cross_entropy(
            plain(input_ids=tokens[None]).logits[0, :-1], tokens[1:], reduction="sum"
        )
        for tokens in pieces
    )
    packed = model(batch, torch.float32)
    torch.testing.assert_close(packed, alone, **NEAR)
    packed.backward()
    torch.as_tensor(alone).backward()
    targets = tiny.targets([batch])
    for parameter, gradient in gradients(model.hf).items():
        torch.testing.assert_close(
            gradient / targets, gradients(plain)[parameter] / targets, **NEAR, msg=parameter
        )


def test_what_the_self_check_leaves_out_is_tried_here() -> None:
    assert sorted(TRIED) == sorted({family for family, _ in families.FAMILIES.values()})


@pytest.mark.parametrize("name", CASES)
def test_the_self_check_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the published sizes, as a run has them."""
    monkeypatch.setattr(self_check, "TRIED", ())
    family, changes = families.FAMILIES[name]
    numbers = {name: value for name, value in changes.items() if not isinstance(value, list)}
    config = AutoConfig.for_model(family, **numbers)
    assert "has the same loss" in str(self_check.self_check(config))


def test_a_family_that_rounds_more_than_others_is_held_to_its_own_rounding() -> None:
    """Gemma 4 does not scale its scores down; its second kind of layers has larger heads."""
    assert "has the same loss" in str(self_check.self_check(AutoConfig.for_model("gemma4_text")))
    config = AutoConfig.for_model("gemma4_text", **families.COMMON)
    assert "has the same loss" in str(self_check.self_check(config))


def test_a_family_that_packing_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "TRIED", ())
    monkeypatch.setattr(causal_lm, "logit_scale", lambda _: 1.0)
    config = AutoConfig.for_model("granite", logits_scaling=8.0)
    with pytest.raises(UserError, match=r"never tried here.* differs by"):
        self_check.self_check(config)


@pytest.mark.parametrize("family", ["mamba", "falcon", "stablelm", "t5", "gpt_oss"])
def test_what_cannot_pack_is_refused_with_a_sentence(family: str) -> None:
    with pytest.raises(UserError, match=r"atoll models|asks its attention for s_aux"):
        settings = Model(name="x", config={"model_type": family})
        self_check.self_check(build_config(settings, 128, 32, {}))


def test_what_reads_more_than_text_is_refused() -> None:
    settings = Model(name="tiny", config={"model_type": "gemma3"})
    with pytest.raises(UserError, match="gemma3 has no vocabulary of its own") as caught:
        build_config(settings, families.VOCABULARY, tiny.SEQUENCE, {})
    assert caught.value.hint == "choose the text model of the family"


def recorded_products(patch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of each grouped product's factors from now on."""
    dtypes: list[torch.dtype] = []
    product = torch.nn.functional.grouped_mm

    def recorded(x: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
        dtypes.extend((x.dtype, weight.dtype))
        return product(x, weight, **more)

    patch.setattr(torch.nn.functional, "grouped_mm", recorded)
    return dtypes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_compute_in_autocast_s_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As linear layers do; parameters and their gradients stay in fp32."""
    model, _ = both(name)
    batch, dtypes = tiny.batch(5, samples=2), recorded_products(monkeypatch)
    whole = float(model(batch, torch.float32).detach())
    assert set(dtypes) == {torch.float32}
    dtypes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch, torch.bfloat16)
    loss.backward()
    assert set(dtypes) == {torch.bfloat16}
    assert float(loss.detach()) == pytest.approx(whole, rel=1e-2)
    grads = {n: g for n, g in gradients(model).items() if ".experts." in n}
    assert grads
    assert all(g.dtype == torch.float32 and bool(g.any()) for g in grads.values())


def test_experts_under_autocast_are_one_graph() -> None:
    torch._dynamo.reset()
    model, _ = both("qwen3_moe")
    batch = tiny.batch(5, samples=2)
    with torch.autocast("cpu", torch.bfloat16):
        plain = float(model(batch, torch.bfloat16).detach())
        for block in blocks_of(model.hf, model.parts):
            for experts in experts_of(block).values():
                experts.compile(fullgraph=True, backend="eager")
        compiled = float(model(batch, torch.bfloat16).detach())
    assert compiled == pytest.approx(plain, rel=1e-3)
