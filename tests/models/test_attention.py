"""Documents of one sample do not see each other, and each is attended to as if alone."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import defaults
import families
import pytest
import tiny
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.data.batch import Batch
from atoll.errors import UserError
from atoll.models import attention, causal_lm
from atoll.models.build import build_config, build_model, weights_for
from atoll.models.causal_lm import CausalLM
from atoll.models.compiled import compile_blocks
from atoll.models.parts import blocks_of
from atoll.models.weights import fill, fill_buffers, materialize
from atoll.settings import Model, Training

CPU = torch.device("cpu")


def model_of(architecture: str, **changes: Any) -> CausalLM:
    settings = Model(name="tiny", config=tiny.CONFIGS[architecture] | changes)
    training = Training(**defaults.group("training", global_batch_samples=1))
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


def whole(batch: Batch) -> Batch:
    """Each sample as one document."""
    samples, tokens = batch.tokens_BT.shape
    return replace(
        batch,
        labels_BT=batch.tokens_BT,
        positions_BT=torch.arange(tokens).expand(samples, -1).contiguous(),
        segment_ends=torch.arange(0, (samples + 1) * tokens, tokens, dtype=torch.int32),
        segment_lengths=(tokens,) * samples,
    )


def test_one_document_a_sample_goes_through_one_call() -> None:
    model = model_of("llama").eval()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        calls = counted_calls(patch)
        model(whole(tiny.batch(5)), torch.float32)
    assert len(calls) == tiny.CONFIGS["llama"]["num_hidden_layers"]
    assert all(call["is_causal"] and call.get("attn_mask") is None for _, call in calls)


class CountedOperators(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("activation_checkpointing", "factor"), [("selective", 1), ("full", 2)])
def test_selective_checkpointing_keeps_what_the_packed_kernel_computed(
    monkeypatch: pytest.MonkeyPatch, activation_checkpointing: Any, factor: int
) -> None:
    """The kernel needs a GPU: here only its shapes go through the model."""
    monkeypatch.setattr(causal_lm, "has_varlen_kernel", lambda *_: True)
    choices = {"global_batch_samples": 1, "activation_checkpointing": activation_checkpointing}
    training = Training(**defaults.group("training", **choices))
    settings = Model(name="tiny", config=tiny.CONFIGS["llama"])
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    model, batch = build_model(config, training), tiny.batch(5, samples=2)
    counted = CountedOperators()
    with FakeTensorMode(allow_non_fake_inputs=True), counted:
        materialize(model, CPU)
        model(batch, torch.bfloat16).backward()
    assert counted.calls["torch_attn::_varlen_attn"] == factor * config.num_hidden_layers
    assert counted.calls["torch_attn::_varlen_attn_backward"] == config.num_hidden_layers


def test_selective_checkpointing_works_where_torch_has_no_packed_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.setattr(torch.ops, "torch_attn", SimpleNamespace())
    kept = attention.kept_operators()
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in kept
    assert not any("varlen" in operator.name() for operator in kept)


GPU = torch.device("cuda")
DROPS = {"attn_pdrop": 0.1}


@pytest.mark.parametrize(
    ("architecture", "changes", "device", "dtype", "expected"),
    [
        ("llama", {}, GPU, torch.bfloat16, True),
        ("llama", {}, GPU, torch.float32, False),
        ("llama", {}, CPU, torch.bfloat16, False),
        ("gpt2", {}, GPU, torch.bfloat16, True),
        ("gpt2", DROPS, GPU, torch.bfloat16, False),
        ("bert", {"attention_probs_dropout_prob": 0.1}, GPU, torch.bfloat16, False),
        ("gemma2", {}, GPU, torch.bfloat16, False),
    ],
)
def test_documents_with_calls_of_their_own_are_in_no_graph(
    architecture: str,
    changes: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    expected: bool,
) -> None:
    """Dropout, fp32 and capped scores are in no kernel of packed documents."""
    known = tiny.CONFIGS.get(architecture) or families.config_of(architecture)
    config = AutoConfig.for_model(**known | changes)
    assert causal_lm.in_one_call(config, device, dtype, training=True) is expected
    evaluated = expected or "dropout" in "".join(changes) or changes == DROPS
    assert causal_lm.in_one_call(config, device, dtype, training=False) is evaluated


def test_blocks_whose_documents_have_calls_of_their_own_are_compiled_around_them() -> None:
    torch._dynamo.reset()
    model = model_of("gpt2", **DROPS)
    batch = replace(tiny.batch(5, samples=2), seed=3)
    plain = float(model(batch, torch.bfloat16).detach())
    seen: list[Any] = []
    one_graph = causal_lm.in_one_call(model.hf.config, GPU, torch.bfloat16, training=True)
    blocks = blocks_of(model.hf, model.parts)
    compile_blocks(blocks, one_graph, lambda graph, inputs: seen.append(graph) or graph.forward)
    compiled = float(model(batch, torch.bfloat16).detach())
    assert compiled == pytest.approx(plain, rel=1e-6)
    assert seen, "what is around the calls is compiled"


@pytest.fixture
def either_arithmetic() -> Iterator[Callable[[bool], None]]:
    """Tells torch to be deterministic or not; afterwards it is not."""
    yield lambda strict: torch.use_deterministic_algorithms(strict, warn_only=True)
    torch.use_deterministic_algorithms(False)


def test_a_block_has_a_graph_for_each_way_it_is_called(
    monkeypatch: pytest.MonkeyPatch, either_arithmetic: Callable[[bool], None]
) -> None:
    """More ways than torch allows by itself; the kernel needs a GPU, another stands for it here."""

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Any, kernel: Any) -> Any:
        return attention._whole(q, k, v, kernel) + 0 * ends.sum()

    monkeypatch.setattr(attention, "_varlen", packed)
    monkeypatch.setattr(causal_lm, "has_varlen_kernel", lambda *_: True)
    torch._dynamo.reset()
    seen: list[Any] = []
    model = model_of("llama")
    with torch._dynamo.config.patch(recompile_limit=8):
        blocks = blocks_of(model.hf, model.parts)
        compile_blocks(blocks, True, lambda graph, inputs: seen.append(graph) or graph.forward)
        for training, strict in ((False, False), (True, False), (True, True)):
            either_arithmetic(strict)
            model.train(training)
            for samples in (1, 2, 3, 4):
                for batch in (tiny.batch(samples, samples), whole(tiny.batch(5, samples))):
                    with torch.set_grad_enabled(training):
                        model(batch, torch.float32)
    assert len(seen) > 8


def counted_calls(patch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The arguments of all calls of torch's kernel from now on."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def counted(*tensors: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append((tensors, more))
        return sdpa(*tensors, **more)

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    return calls


def test_documents_need_no_kernel_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of("llama"), counted_calls(monkeypatch)
    lengths = set()
    for seed in range(20):
        batch = tiny.batch(seed, samples=3)
        lengths |= set(batch.segment_lengths)
        with torch.autocast("cpu", torch.bfloat16):
            model(batch, torch.bfloat16).backward()
    assert {k.shape[2] for (_, k, _), _ in calls} == lengths
    assert all(x.dtype == torch.float32 for tensors, _ in calls for x in tensors)


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(attention.SHORT_TOKENS, torch.float32), (attention.SHORT_TOKENS + 1, torch.bfloat16)],
)
def test_whole_samples_in_half_precision(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted_calls(monkeypatch)
    # positions turn queries and keys back into fp32
    query, key, value = (torch.randn(1, 2, tokens, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention.packed_attention(torch.nn.Module(), query, key, value.bfloat16(), None)
    assert [x.dtype for tensors, _ in calls for x in tensors] == [dtype] * 3
    assert out.dtype == torch.bfloat16


def test_whole_samples_beside_others_go_through_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = attention.SHORT_TOKENS + 1
    calls = counted_calls(monkeypatch)
    inputs = [torch.randn(4, 2, tokens, 8, dtype=torch.bfloat16) for _ in range(3)]
    lengths = (tokens, 1, tokens - 1, tokens, tokens)
    attention.packed_attention(torch.nn.Module(), *inputs, None, segment_lengths=lengths)
    shapes = [(query.shape[0], query.shape[2], query.dtype) for (query, _, _), _ in calls]
    of_parts = [(1, length, torch.float32) for length in (1, tokens - 1)]
    assert shapes == [(3, tokens, torch.bfloat16), *of_parts]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("lengths", "samples"),
    [((1, 40, 7, 32, 40, 8), 2), ((64, 40, 24, 64, 32, 64, 32), 5), ((64, 64), 2)],
)
def test_a_segment_is_attended_to_as_if_alone(
    dtype: torch.dtype, causal: bool, lengths: tuple[int, ...], samples: int
) -> None:
    heads, width = 2, 16
    shape = (samples, heads, sum(lengths) // samples, width)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    module: Any = SimpleNamespace(is_causal=causal)
    out_BTHD, _ = attention.packed_attention(module, *inputs, None, segment_lengths=lengths)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    parts = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1).split(lengths, 1) for x in doubles]
    alone = [
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        for q, k, v in zip(*parts, strict=True)
    ]
    expected_BTHD = torch.cat(alone, 1).transpose(0, 1).view_as(out_BTHD)
    weight = torch.randn(out_BTHD.shape)
    (out_BTHD * weight).sum().backward()
    (expected_BTHD * weight).sum().backward()
    near = dict.fromkeys(("atol", "rtol"), 1e-2 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(out_BTHD.double(), expected_BTHD, **near)
    for x, exact in zip(inputs, doubles, strict=True):
        assert x.grad is not None and exact.grad is not None
        torch.testing.assert_close(x.grad.double(), exact.grad, **near)


@pytest.mark.parametrize("asked", [{"sliding_window": 5}, {"softcap": 0.5}])
@pytest.mark.parametrize("more", [{}, {"sliding_window": 150}])
def test_windows_and_capped_scores_are_those_of_whole_scores(
    asked: dict[str, Any], more: dict[str, Any]
) -> None:
    asked = more | asked
    lengths, module = (3, 200, 97), torch.nn.Module()
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    packed, _ = attention.packed_attention(
        module, *inputs, None, segment_lengths=lengths, use_cache=False, **asked
    )
    alone = [
        attention.packed_attention(module, *parts, None, **asked)[0]
        for parts in zip(*(x.split(lengths, 2) for x in inputs), strict=True)
    ]
    exact = [
        whole_scores(*parts, **asked)
        for parts in zip(*(x.split(lengths, 2) for x in inputs), strict=True)
    ]
    near = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(torch.cat(alone, 1), torch.cat(exact, 1), **near)
    torch.testing.assert_close(packed, torch.cat(exact, 1), **near)
    weight = torch.randn(packed.shape, generator=generator)
    ours = torch.autograd.grad((packed * weight).sum(), inputs)
    theirs = torch.autograd.grad((torch.cat(exact, 1) * weight).sum(), inputs)
    torch.testing.assert_close(ours, theirs, **near)


def whole_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sliding_window: int = 999, softcap: float = 0
) -> torch.Tensor:
    """Causal attention as it is written down, with all scores at once: [B, T, H, D]."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    places = torch.arange(q.shape[2])
    distance = places[:, None] - places
    scores = scores.masked_fill((distance < 0) | (distance >= sliding_window), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_what_attention_does_not_compute_is_refused() -> None:
    inputs = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    packed = attention.packed_attention
    for name in ("s_aux", "position_bias", "indices", "what_comes_next_year"):
        with pytest.raises(UserError, match=f"asks its attention for {name}, which"):
            packed(torch.nn.Module(), *inputs, None, **{name: torch.ones(2)})
        packed(torch.nn.Module(), *inputs, None, **{name: None})
    both_ways: Any = SimpleNamespace(is_causal=False)
    with pytest.raises(UserError, match="looks both ways"):
        packed(both_ways, *inputs, None, sliding_window=3)
