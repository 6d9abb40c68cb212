"""Linear layers of 4 bits a weight (nf4, Dettmers et al. 2023) that FSDP2 may divide.

bitsandbytes' own layer keeps its scales on the parameter, which is another one once it is divided.
Here the layer keeps them, whole on every rank: 1/32 of the bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import UserError
from atoll.models.weights import ReadTensor, local_part

BLOCK = 64  # weights that share a scale (bitsandbytes' default)


class Nf4Linear(nn.Linear):
    """Its weight is the rows' bytes, seen as numbers of the type that is computed with.

    FSDP2 would convert numbers of another type.
    """

    scales: Any = None  # bitsandbytes' QuantState

    def pack(self, dtype: torch.dtype) -> None:
        """Give the weight on the meta device the shape of its bytes."""
        numbers, rest = divmod(self.in_features, 2 * dtype.itemsize)
        if rest:
            raise UserError(
                f"a matrix is {self.in_features} wide, and {2 * dtype.itemsize} weights of 4 bits "
                "are one number that is sharded",
                f"choose sizes that {2 * dtype.itemsize} divides, or model.quantisation=none",
            )
        bytes_of_rows = torch.empty(self.out_features, numbers, dtype=dtype, device="meta")
        self.weight = nn.Parameter(bytes_of_rows, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        import bitsandbytes as bnb

        packed = self.weight.view(torch.uint8)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product: Tensor = bnb.matmul_4bit(x, packed, bias=bias, quant_state=self.scales)
        return product.to(x.dtype)


def refuse_crossing_blocks(weight: Tensor, device: torch.device) -> None:
    """Raise `UserError` where bitsandbytes' arithmetic on a CPU is wrong."""
    if device.type == "cpu" and weight.shape[1] % BLOCK:
        raise UserError(
            f"a matrix is {weight.shape[1]} wide, and on a CPU bitsandbytes mixes up blocks of "
            f"{BLOCK} where they cross rows",
            f"choose sizes that {BLOCK} divides, or model.quantisation=none",
        )


def quantised(weight: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """The bytes of a matrix, two weights in each, and their scales."""
    import bitsandbytes as bnb

    refuse_crossing_blocks(weight, device)
    packed, scales = bnb.functional.quantize_4bit(
        weight.to(device).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return packed.flatten(), scales


@torch.no_grad()
def fill_packed(hf: Any, read: ReadTensor, device: torch.device) -> frozenset[str]:
    """Read one matrix at a time, quantise it, keep this rank's rows; the parameters' names.

    Every rank quantises the same whole matrix: blocks and their scales cross the shards' borders.
    """
    filled = set()
    for name, module in hf.named_modules():
        if isinstance(module, Nf4Linear):
            everything = (slice(0, module.out_features), slice(0, module.in_features))
            packed, module.scales = quantised(read(f"{name}.weight", everything), device)
            local, slices = local_part(module.weight)
            local.copy_(packed.view(local.dtype).view(module.weight.shape)[slices])
            filled.add(f"{name}.weight")
    return frozenset(filled)


def dequantised(module: Nf4Linear, packed: Tensor) -> Tensor:
    """The matrix that whole packed bytes stand for."""
    import bitsandbytes as bnb

    flat = packed.to(module.scales.absmax.device).view(torch.uint8).reshape(-1, 1)
    return torch.as_tensor(bnb.functional.dequantize_4bit(flat, module.scales))
