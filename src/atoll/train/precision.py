"""The compute dtype, decided by what the device can do."""

import torch

from atoll.errors import UserError
from atoll.settings import Precision


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 natively; on ROCm as on CUDA it is asked, not guessed."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        known = capabilities()
        return bool(known.get("amx_bf16") or known.get("avx512_bf16") or known.get("bf16"))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def compute_dtype(precision: Precision, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype and a line saying why."""
    able = has_bf16(device)
    if precision.compute == "fp32":
        return torch.float32, "fp32: precision=fp32"
    if precision.compute == "bf16" and not able:
        raise UserError(
            f"precision=bf16, but this {device.type} device does not compute in bf16",
            "choose precision=fp32 or precision=auto",
        )
    if able:
        return torch.bfloat16, f"bf16, parameters fp32: this {device.type} device computes in bf16"
    return torch.float32, f"fp32: this {device.type} device does not compute in bf16"
