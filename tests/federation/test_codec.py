"""What each encoding costs in bytes and in exactness, and that error feedback gives it back."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.federation.codec import CODECS, stored_length
from atoll.federation.error_feedback import encoded_tensors, read_decoded, write_encoded
from atoll.federation.tensors import Stretch, TensorReader, TensorWriter

# codec -> (bytes per value, relative error on normal values)
COSTS = {
    "fp32": (4.0, 0.0),
    "bf16": (2.0, 0.003),
    "int8": (1.0 + 2 / 64, 0.01),
    "int4": (0.5 + 2 / 64, 0.17),
    "int2": (0.25 + 2 / 64, 0.36),
    "sparse": (2 * 2 / 64, 0.92),
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
        *((16, 1, 1), (16, 4, 1), (16, 5, 2), (16, 64, 16), (16, 65, 17)),  # four in one
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


def test_int2_puts_four_values_into_a_byte_the_first_one_lowest() -> None:
    scale = 1.248 * 1.25  # the mean of the magnitudes is 1.25, of the five that are there
    parts = CODECS["int2"].encode(torch.tensor([2.0, -2.0, 0.5, -0.5, 1.25]))
    assert parts[":scale"].tolist() == [float(torch.tensor(scale).bfloat16())]
    assert parts[""].tolist() == [3 | 0 << 2 | 2 << 4 | 1 << 6, 2]
    step = float(parts[":scale"])
    wanted = [1.5 * step, -1.5 * step, 0.5 * step, -0.5 * step, 0.5 * step]
    assert CODECS["int2"].decode(parts, 5).tolist() == wanted


def test_sparse_keeps_the_two_largest_of_each_block_in_a_byte_each() -> None:
    values = torch.full((132,), 0.25)
    values[3], values[63] = 4.0, -8.0  # a half of the larger
    values[66], values[69] = -2.0, -1.75  # nearer to the whole
    values[130], values[131] = 1.0, 0.75  # in the middle
    parts = CODECS["sparse"].encode(values)
    assert parts[":scale"].tolist() == [8.0, 2.0, 1.0]
    assert parts[""].tolist() == [63 | 128, 3 | 64, 2 | 128, 5 | 128, 2, 3]
    wanted = torch.zeros(132)
    wanted[3], wanted[63], wanted[66], wanted[69] = 4.0, -8.0, -2.0, -2.0
    wanted[130], wanted[131] = 1.0, 1.0
    assert torch.equal(CODECS["sparse"].decode(parts, 132), wanted)


def test_any_bytes_are_some_sparse_update() -> None:
    parts = {"": torch.tensor([255, 64], dtype=torch.uint8), ":scale": torch.ones(1).bfloat16()}
    decoded = CODECS["sparse"].decode(parts, 64)
    assert (decoded[63], decoded[0], int(decoded.count_nonzero())) == (-0.5, 0.5, 2)


def test_what_sparse_left_out_is_forgotten_bit_by_bit(tmp_path: Path) -> None:
    """One round's values, then none: what is left shrinks by a twentieth more than is sent."""
    values = torch.tensor([8.0, 4.0, 2.0, 1.0])
    stretch, residual = Stretch("w", 0, 4), None
    sent = []
    for number in range(3):
        layout = {"d.safetensors": encoded_tensors({"w": (4,)}, "sparse")}
        folder = tmp_path / str(number)
        folder.mkdir()
        with TensorWriter(folder, layout) as writer:
            decoded, residual = write_encoded(writer, "sparse", stretch, values, residual)
        with TensorReader(folder) as reader:
            assert torch.equal(read_decoded(reader, "sparse", stretch), decoded)
        sent.append(decoded)
        values = torch.zeros(4)
    assert sent[0].tolist() == [8.0, 4.0, 0.0, 0.0]
    scale = float(torch.tensor(0.95 * 2.0).bfloat16())
    assert sent[1].tolist() == [0.0, 0.0, scale, scale / 2]


@pytest.mark.parametrize("codec", ["int4", "int2", "sparse", "topk"])
def test_error_feedback_gives_back_what_was_left_out(codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(6400, generator=generator)
    coding, residual = CODECS[codec], torch.zeros(6400)
    summed, plain, sent = torch.zeros(6400), torch.zeros(6400), torch.zeros(6400)
    for _ in range(40):
        values = direction + 0.3 * torch.randn(6400, generator=generator)
        summed += values
        plain += coding.decode(coding.encode(values), 6400)
        wanted = values + coding.feedback * residual
        decoded = coding.decode(coding.encode(wanted), 6400)
        residual = wanted - decoded
        sent += decoded
    error = float((sent - summed).norm() / summed.norm())
    assert error < 0.6 * float((plain - summed).norm() / summed.norm())
