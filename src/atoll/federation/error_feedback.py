"""Encoded tensors in files, with error feedback.

What an encoding leaves out, the residual, is kept and added before the next encoding, so that it
arrives late rather than never (error feedback: Seide et al. 2014, "1-bit stochastic gradient
descent"). A facility keeps the residual of its update, the coordinator that of the global model.
Legend: N values of a stretch.
"""

from math import prod

import torch
from torch import Tensor

from atoll.federation.codec import CODECS, stored_length
from atoll.federation.tensors import Layout, Stretch, TensorReader, TensorWriter, TypedLayout


def encoded_tensors(
    tensors: dict[str, tuple[int, ...]], codec: str
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Tensor of an encoded file -> its format and length."""
    return {
        name + suffix: (dtype, (stored_length(per_block, prod(shape)),))
        for name, shape in tensors.items()
        for suffix, (dtype, per_block) in CODECS[codec].parts.items()
    }


def encoded_layout(layout: Layout, codec: str, prefix: str = "") -> TypedLayout:
    return {prefix + file: encoded_tensors(tensors, codec) for file, tensors in layout.items()}


def read_decoded_into(values_N: Tensor, reader: TensorReader, codec: str, stretch: Stretch) -> None:
    """Put the values of a stretch of an encoded tensor into this memory, in fp32."""
    if codec == "fp32":
        reader.values(stretch, values_N)  # as they are: no second copy
    else:
        values_N.copy_(read_decoded(reader, codec, stretch))


def read_decoded(reader: TensorReader, codec: str, stretch: Stretch) -> Tensor:
    """The values of a stretch of an encoded tensor, in fp32."""
    coding = CODECS[codec]
    parts = {
        suffix: reader.values(_part(stretch, suffix, per_block))
        for suffix, (_, per_block) in coding.parts.items()
    }
    return coding.decode(parts, stretch.count)


def write_encoded(
    writer: TensorWriter, codec: str, stretch: Stretch, values_N: Tensor, residual_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Encode and write values with the residual of the encoding before.

    Gives what whoever reads it will find, and the residual that is to be added the next time.
    """
    coding = CODECS[codec]
    wanted_N = values_N if residual_N is None else values_N + coding.feedback * residual_N
    parts = coding.encode(wanted_N)
    for suffix, (_, per_block) in coding.parts.items():
        writer.put(_part(stretch, suffix, per_block), parts[suffix])
    decoded_N = coding.decode(parts, stretch.count)
    return decoded_N, wanted_N - decoded_N


def _part(stretch: Stretch, suffix: str, per_block: int) -> Stretch:
    """Where a part of an encoded stretch lies in its own tensor."""
    first, count = (stored_length(per_block, n) for n in (stretch.first, stretch.count))
    return Stretch(stretch.name + suffix, first, count)
