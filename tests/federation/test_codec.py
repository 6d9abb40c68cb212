"""What each encoding costs in bytes and in exactness, and that error feedback gives it back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.federation.codec import CODECS, stored_length

# codec -> (bytes per value, relative error on normal values)
COSTS = {
    "fp32": (4.0, 0.0),
    "bf16": (2.0, 0.003),
    "int8": (1.0 + 2 / 64, 0.01),
    "int4": (0.5 + 2 / 64, 0.17),
    "topk": (3 * 2 / 64, 0.91),
}


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_and_error(codec: str) -> None:
    size, error = COSTS[codec]
    values = torch.randn(64 * 500, generator=torch.Generator().manual_seed(1)) * 1e-4
    parts = CODECS[codec].encode(values)
    stored = sum(part.numel() * part.element_size() for part in parts.values())
    assert stored / values.numel() == pytest.approx(size)
    for suffix, (dtype, per_block) in CODECS[codec].parts.items():
        assert parts[suffix].dtype == dtype
        assert len(parts[suffix]) == stored_length(per_block, len(values))
    decoded = CODECS[codec].decode(parts, len(values))
    assert float((decoded - values).norm() / values.norm()) <= error


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None)
@given(count=st.integers(1, 200), scale=st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e4]))
def test_any_length_and_scale(codec: str, count: int, scale: float) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * scale
    parts = CODECS[codec].encode(values)
    for suffix, (_, per_block) in CODECS[codec].parts.items():
        assert len(parts[suffix]) == stored_length(per_block, count)
    decoded = CODECS[codec].decode(parts, count)
    assert decoded.shape == values.shape and decoded.dtype == torch.float32
    assert bool(torch.isfinite(decoded).all())
    assert float((decoded - values).abs().max()) <= 1.01 * float(values.abs().max())


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_error_feedback_gives_back_what_was_left_out(codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(6400, generator=generator)
    coding, residual = CODECS[codec], torch.zeros(6400)
    summed, plain, sent = torch.zeros(6400), torch.zeros(6400), torch.zeros(6400)
    for _ in range(40):
        values = direction + 0.3 * torch.randn(6400, generator=generator)
        summed += values
        plain += coding.decode(coding.encode(values), 6400)
        decoded = coding.decode(coding.encode(values + residual), 6400)
        residual = values + residual - decoded
        sent += decoded
    error = float((sent - summed).norm() / summed.norm())
    assert error < 0.6 * float((plain - summed).norm() / summed.norm())
