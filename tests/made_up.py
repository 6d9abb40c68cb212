"""Small global models and updates, made without training."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.federation.global_model import first_global
from atoll.federation.make_delta import make_delta
from atoll.federation.update import Update, read_manifest
from atoll.federation.update_files import refuse_wrong_files

SHAPES = {"embed.weight": (300, 7), "layer.0.weight": (65, 64), "layer.0.bias": (65,), "one": (1,)}


def weights(seed: int, scale: float = 0.02) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator) * scale for n, shape in SHAPES.items()}


def write_model(folder: Path, tensors: dict[str, Tensor], files: int = 2) -> Path:
    folder.mkdir(parents=True)
    names = list(tensors)
    for number in range(files):
        part = {name: tensors[name].contiguous() for name in names[number::files]}
        save_file(part, folder / f"model-{number + 1:05d}-of-{files:05d}.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    return folder


def first(folder: Path, seed: int = 0) -> Path:
    first_global(write_model(folder / "start", weights(seed)), folder / "global-0", {})
    return folder / "global-0"


def about(facility: str, **changes: Any) -> dict[str, Any]:
    known = {
        "campaign": "c",
        "round": 1,
        "facility": facility,
        "tokens": 1000,
        "steps": 10,
        "loss": 2.5,
        "image": "none",
        "configuration": "x",
        "data": "y",
    }
    return known | changes


def update(
    folder: Path,
    base: Path,
    facility: str,
    delta: dict[str, Tensor],
    codec: str = "fp32",
    previous_residual: Path | None = None,
    provenance: Path | None = None,
    **changes: Any,
) -> Update:
    """An update whose difference to the base is `delta`."""
    start = read(base / "master")
    trained = folder / f"trained-{facility}"
    write_model(trained, {name: start[name] + delta[name] for name in start}, files=1)
    out = folder / f"update-{facility}"
    residual = folder / f"residual-{facility}"
    values = about(facility, **changes)
    make_delta(
        base, trained, previous_residual, codec, out, residual, values, provenance=provenance
    )
    manifest = read_manifest(out)
    refuse_wrong_files(out, manifest)
    return Update(manifest, out)


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
