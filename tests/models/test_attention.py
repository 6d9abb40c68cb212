"""Documents of one sample do not see each other, and each is attended to as if alone."""

from dataclasses import replace

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from atoll.models.build import build_config, build_model, weights_for
from atoll.models.causal_lm import CausalLM
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Model, Training

CPU = torch.device("cpu")


def model_of(architecture: str) -> CausalLM:
    settings = Model(name="tiny", config=tiny.CONFIGS[architecture])
    training = Training(steps=1, global_batch_samples=1, microbatch_samples=1)
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model = build_model(config, training)
    materialize(model, CPU)
    with weights_for(settings, config, 0) as read:
        fill(model.hf, read)
    fill_buffers(model.hf)
    return model


def plain(model: CausalLM, architecture: str) -> torch.nn.Module:
    """The same weights in transformers' own model with its own attention."""
    config = build_config(
        Model(name="tiny", config=tiny.CONFIGS[architecture]), tiny.VOCABULARY, tiny.SEQUENCE, {}
    )
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    reference.load_state_dict(model.hf.state_dict())
    return reference.eval()


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_packed_loss_is_the_sum_of_the_documents_alone(architecture: str) -> None:
    model = model_of(architecture).eval()
    reference = plain(model, architecture)
    batch = tiny.batch(5, samples=2)
    total, start = 0.0, 0
    for length in batch.segment_lengths:
        tokens = batch.tokens_BT.flatten()[start : start + length][None]
        start += length
        with torch.no_grad():
            logits = reference(input_ids=tokens).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
    with torch.no_grad():
        ours = float(model(batch, torch.float32))
    assert ours == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_a_document_does_not_see_the_one_before(architecture: str) -> None:
    model = model_of(architecture).eval()
    batch = tiny.batch(5)
    first = batch.segment_lengths[0]
    tokens = batch.tokens_BT.clone()
    tokens[:, :first] = (tokens[:, :first] + 7) % tiny.VOCABULARY
    labels = batch.labels_BT.clone()
    labels[:, :first] = -100
    changed = replace(batch, tokens_BT=tokens, labels_BT=labels)
    unchanged = replace(batch, labels_BT=labels)
    with torch.no_grad():
        assert float(model(changed, torch.float32)) == float(model(unchanged, torch.float32))


def test_one_document_a_sample_goes_through_one_call() -> None:
    model = model_of("llama").eval()
    batch = tiny.batch(5)
    whole = replace(
        batch,
        labels_BT=batch.tokens_BT,
        positions_BT=torch.arange(tiny.SEQUENCE)[None],
        segment_ends=torch.tensor([0, tiny.SEQUENCE], dtype=torch.int32),
        segment_lengths=(tiny.SEQUENCE,),
    )
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(kwargs)
        return sdpa(*args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        model(whole, torch.float32)
    assert len(calls) == tiny.CONFIGS["llama"]["num_hidden_layers"]
    assert all(call["is_causal"] and call.get("attn_mask") is None for call in calls)
