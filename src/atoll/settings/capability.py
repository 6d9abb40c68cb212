"""Which devices code was built for: NVIDIA's compute capabilities, AMD's gfx names."""

from collections.abc import Sequence

PTX = "+PTX"


def runs_on(device: str, built_for: Sequence[str]) -> bool:
    """Whether a device runs code that was built for these.

    NVIDIA's binaries run on their own major version, from their minor version on; `+PTX` is
    compiled on the spot for all that is newer (CUDA Programming Guide, Binary and PTX
    Compatibility). AMD's run on their own gfx alone.
    """
    return any(_runs_on(device, target) for target in built_for)


def _runs_on(device: str, target: str) -> bool:
    name = target.removesuffix(PTX)
    if device.startswith("gfx") or name.startswith("gfx"):
        return device == name
    own, built = _numbers(device), _numbers(name)
    return own >= built if target.endswith(PTX) else own[0] == built[0] and own >= built


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
