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


@pytest.mark.parametrize(
    ("per_block", "count", "length"),
    [
        *((64, 1, 1), (64, 64, 64), (64, 65, 65)),  # one stored value for each
        *((32, 1, 1), (32, 3, 2), (32, 64, 32), (32, 65, 33)),  # two in one
        *((2, 1, 2), (2, 64, 2), (2, 65, 4), (1, 64, 1), (1, 65, 2), (1, 129, 3)),  # for a block
    ],
)
def test_stored_lengths(per_block: int, count: int, length: int) -> None:
    assert stored_length(per_block, count) == length


def test_int8_is_whole_steps_of_each_block_s_scale() -> None:
    values = torch.cat([torch.arange(64.0) * 2 + 1, torch.tensor([254.0, -254.0, 2.0, 0.0])])
    parts = CODECS["int8"].encode(values)
    assert parts[":scale"].tolist() == [1.0, 2.0]
    assert parts[""].tolist() == [*range(1, 129, 2), 127, -127, 1, 0]
    assert torch.equal(CODECS["int8"].decode(parts, 68), values)


def test_int4_puts_two_values_into_a_byte_the_first_one_low() -> None:
    values = torch.tensor([7.0, -7.0, 0.0, 1.0, 5.0])
    parts = CODECS["int4"].encode(values)
    assert parts[":scale"].tolist() == [1.0]
    assert parts[""].tolist() == [15 | 1 << 4, 8 | 9 << 4, 13 | 8 << 4]
    assert torch.equal(CODECS["int4"].decode(parts, 5), values)
    assert torch.equal(CODECS["int4"].decode(CODECS["int4"].encode(3 * values), 5), 3 * values)


@pytest.mark.parametrize(("codec", "largest"), [("int8", 127), ("int4", 7)])
def test_a_scale_that_is_rounded_down_leaves_the_largest_value_its_sign(
    codec: str, largest: int
) -> None:
    scale = 1.0 + 2.0**-8  # bf16 rounds it to one
    values = torch.tensor([scale * largest, -scale * largest, 1.0])
    parts = CODECS[codec].encode(values)
    assert parts[":scale"].tolist() == [1.0]
    assert CODECS[codec].decode(parts, 3).tolist() == [largest, -largest, 1.0]


def test_topk_keeps_the_two_largest_of_each_block() -> None:
    values = torch.full((70,), 0.5)
    values[3], values[63], values[66], values[69] = -8.0, 4.0, 2.0, -1.0
    parts = CODECS["topk"].encode(values)
    assert parts[":place"].tolist() == [3, 63, 2, 5]
    assert parts[""].tolist() == [-8.0, 4.0, 2.0, -1.0]
    decoded = CODECS["topk"].decode(parts, 70)
    assert torch.equal(decoded, torch.where(values == 0.5, torch.zeros(70), values))


def test_places_that_no_block_has_do_no_harm() -> None:
    """An update comes from elsewhere: its places may be any bytes."""
    parts = {
        ":place": torch.tensor([255, 64], dtype=torch.uint8),
        "": torch.tensor([0.0, 0.0], dtype=torch.bfloat16),
    }
    assert CODECS["topk"].decode(parts, 64).tolist() == [0.0] * 64
    parts[":place"] = torch.tensor([0, 200], dtype=torch.uint8)
    parts[""] = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    assert CODECS["topk"].decode(parts, 64).tolist() == [1.0, *[0.0] * 62, 3.0]


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
