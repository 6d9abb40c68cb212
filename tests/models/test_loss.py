"""The chunked cross-entropy against torch's own."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.models import loss
from atoll.models.causal_lm import CausalLM
from atoll.models.loss import chunked_cross_entropy, chunked_log_probabilities

TOKENS, WIDTH, VOCABULARY = 37, 6, 50


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (hidden, weight, bias)]


def labels() -> torch.Tensor:
    chosen = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    chosen[::5] = -100
    chosen[1], chosen[2] = 0, VOCABULARY - 1
    return chosen


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equals_torch(chunk: int, with_bias: bool, softcap: float | None) -> None:
    ours, theirs = inputs(torch.float32), inputs(torch.float32)
    bias = ours[2] if with_bias else None
    loss = chunked_cross_entropy(ours[0], ours[1], bias, labels(), chunk, softcap)
    logits = F.linear(theirs[0], theirs[1], theirs[2] if with_bias else None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    for a, b in zip(ours[: 2 + with_bias], theirs, strict=False):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [8, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_z_loss_is_in_the_gradients_alone(chunk: int, softcap: float | None) -> None:
    ours, theirs = inputs(torch.float32), inputs(torch.float32)
    loss = chunked_cross_entropy(*ours, labels(), chunk, softcap, z_loss=0.01)
    logits = F.linear(*theirs)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    plain = F.cross_entropy(logits, labels(), reduction="sum")
    torch.testing.assert_close(loss, plain)
    log_z = logits[labels() != -100].logsumexp(-1)
    loss.backward()
    (plain + 0.01 * log_z.square().sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_log_probabilities_are_torch_s(chunk: int, with_bias: bool) -> None:
    ours, theirs = inputs(torch.float32), inputs(torch.float32)
    bias = ours[2] if with_bias else None
    logp = chunked_log_probabilities(ours[0], ours[1], bias, labels(), chunk)
    logits = F.linear(theirs[0], theirs[1], theirs[2] if with_bias else None)
    expected = -F.cross_entropy(logits, labels(), reduction="none")
    torch.testing.assert_close(logp, expected)
    scales = torch.arange(1.0, TOKENS + 1)
    (logp * scales).sum().backward()
    (expected * scales).sum().backward()
    for a, b in zip(ours[: 2 + with_bias], theirs, strict=False):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def test_without_gradients_every_chunk_counts_and_none_are_computed() -> None:
    called: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.add(str(func))
            return func(*args, **(kwargs or {}))

    hidden, weight, bias = inputs(torch.float32)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), labels(), reduction="sum")
    with torch.no_grad(), Watch():
        loss = chunked_cross_entropy(hidden, weight, bias, labels(), 8)
    torch.testing.assert_close(loss, expected.detach())
    assert not [name for name in called if "scatter_add" in name or ".out" in name], called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (3.0, 0.01)])
def test_what_torch_compile_traces_says_the_same(
    dtype: torch.dtype, softcap: float | None, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = torch.compile(loss._of_logits, backend="aot_eager")  # kernels need a C++ compiler
    monkeypatch.setattr(loss, "_compiled", lambda: traced)
    as_is, compiled = inputs(dtype), inputs(dtype)
    terms = (labels(), 8, softcap, z_loss)
    expected = chunked_cross_entropy(*as_is, *terms)
    got = chunked_cross_entropy(*compiled, *terms, compiled=True)
    torch.testing.assert_close(got, expected)
    (got + expected).backward()
    for a, b in zip(compiled, as_is, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_bf16_is_close_and_keeps_dtypes() -> None:
    hidden, weight, _ = inputs(torch.float32)
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    loss = chunked_cross_entropy(half[0], half[1], None, labels(), 8)
    loss.backward()
    expected = F.cross_entropy(hidden @ weight.T, labels(), reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert half[1].grad is not None and half[1].grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0.5)
    torch.testing.assert_close(half[1].grad.float(), weight.grad, rtol=5e-2, atol=0.1)


@pytest.mark.parametrize("scale", [1 / 1003, 7 / 13])
def test_a_scale_that_bf16_cannot_hold_is_not_rounded(scale: float) -> None:
    unscaled, scaled = inputs(torch.bfloat16), inputs(torch.bfloat16)
    chunked_cross_entropy(*unscaled, labels(), 8).backward()
    (chunked_cross_entropy(*scaled, labels(), 8) * scale).backward()
    for one, other in zip(unscaled, scaled, strict=True):
        assert one.grad is not None and other.grad is not None
        expected = one.grad.float() * scale
        # what was summed in fp32 is rounded once in each, what was in bf16 only by the product
        ulp = 2**-8 if one is not unscaled[0] else 0
        expected_bf16 = expected.bfloat16().float()
        torch.testing.assert_close(other.grad.float(), expected_bf16, rtol=2 * ulp, atol=0)


def test_autocast_lowers_the_product() -> None:
    hidden, weight, _ = inputs(torch.float32)
    seen: list[torch.dtype] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "mm" in str(func):
                seen.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
        chunked_cross_entropy(hidden, weight, None, labels(), 8)
    assert seen and set(seen) == {torch.bfloat16}


def test_autocast_lowers_the_bias_too_and_its_gradient_keeps_its_dtype() -> None:
    hidden, weight, bias = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, bias, labels(), 8)
    loss.backward()
    theirs = inputs(torch.float32)
    expected = F.cross_entropy(F.linear(*theirs), labels(), reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0.5)
    for ours, reference in zip((hidden, weight, bias), theirs, strict=True):
        assert ours.grad is not None and ours.grad.dtype == torch.float32
        torch.testing.assert_close(ours.grad, reference.grad, rtol=5e-2, atol=0.1)


def test_never_holds_more_logits_than_a_chunk() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == VOCABULARY:
                largest = max(largest, out.shape[0])
            return out

    hidden, weight, _ = inputs(torch.float32)
    with Watch():
        chunked_cross_entropy(hidden, weight, None, labels(), 8).backward()
    assert largest == 8


def test_the_stages_of_a_rank_draw_dropout_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def output(*_: object) -> SimpleNamespace:
        seeds.append(torch.initial_seed())
        return SimpleNamespace(last_hidden_state=None)

    monkeypatch.setattr(CausalLM, "_output", output)
    model = CausalLM(torch.nn.Linear(1, 1), None, 1)  # type: ignore[arg-type]
    model.stages = SimpleNamespace(
        ranks=2, stage_view=lambda *_: nullcontext(), is_last=lambda _: False
    )
    for stage in (1, 3):  # both of the second of two ranks
        model(SimpleNamespace(seed=7), torch.float32, None, stage)
    assert seeds == [7, 8]
