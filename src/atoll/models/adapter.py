"""Low-rank adapters beside weights that stay, which may be stored in 8 or 4 bits.

peft makes the adapters, bitsandbytes the narrow weights (Dettmers et al. 2023, QLoRA).
"""

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.models.weights import Reader, Slices
from atoll.settings import Lora, Model

BASE = ".base_layer"
NAME = "default"  # what peft calls an adapter that nobody named
BLOCK = 64  # weights that share a scale (bitsandbytes' default)
OURS = (".lora_A.", ".lora_B.")


def adapt(hf: Any, model: Model) -> None:
    """Put adapters beside the linear layers of a model on the meta device; they alone learn."""
    if model.lora is None:
        return
    from peft import LoraConfig, inject_adapter_in_model

    if model.quantisation != "none":
        _narrow(hf, model.quantisation)
    config = LoraConfig(
        r=model.lora.rank,
        lora_alpha=int(model.lora.alpha),
        lora_dropout=model.lora.dropout,
        target_modules=_targets(hf, model.lora),
    )
    try:
        inject_adapter_in_model(config, hf, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(
            f"model.lora.targets fits no layer: {str(error).splitlines()[0]}",
            "name linear layers of the model, or model.lora.targets=all-linear",
        ) from None


def check_device(quantisation: str, device: torch.device) -> None:
    """Raise `UserError` where this device cannot multiply with weights of so few bits."""
    if quantisation == "none":
        return
    try:
        layer = _linear(quantisation, nn.Linear(64, 64, bias=False, device="meta"))
        layer.weight = _narrowed(layer, torch.ones(64, 64), device)
        # more rows than one: a single one takes a way that only inference has
        layer(torch.ones(4, 64, device=device, requires_grad=True)).sum().backward()
    except Exception as error:  # bitsandbytes fails in many ways where it lacks a backend
        raise UserError(
            f"model.quantisation={quantisation} does not work on this {device.type}: "
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
            "install bitsandbytes for this device, or set model.quantisation=none",
        ) from error


def adapted_reader(read: Reader, seed: int, shapes: dict[str, tuple[int, ...]]) -> Reader:
    """Adapters begin as no change at all: A at random, B zero; all else as `read` gives it."""

    def part(name: str, slices: Slices) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros(shapes[name])[slices]
        if ".lora_A." in name:
            made = torch.empty(shapes[name])
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            nn.init.kaiming_uniform_(made, a=math.sqrt(5), generator=generator)
            return made[slices]
        return read(name.replace(BASE, ""), slices)

    return part


def fill_narrow(hf: Any, read: Reader, device: torch.device) -> None:
    """Read, narrow and place one matrix at a time: the wide ones are never there together."""
    for name, module in hf.named_modules():
        if is_narrow(module):
            whole = tuple(slice(0, size) for size in (module.out_features, module.in_features))
            module.weight = _narrowed(module, read(f"{name}.weight", whole), device)


def is_narrow(module: Any) -> bool:
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt") and not hasattr(
        module, "base_layer"
    )


@dataclass(frozen=True)
class Merged:
    """A matrix with its adapter added, made when it is asked for."""

    base: Tensor
    module: Any  # that holds it
    a: Tensor
    b: Tensor
    scale: float

    def numel(self) -> int:
        return self.a.shape[1] * self.b.shape[0]

    def whole(self) -> Tensor:
        """Collective where the parts are sharded."""
        base = _wide(self.module, self.base).float()
        added = self.scale * (_gathered(self.b).float() @ _gathered(self.a).float())
        # GPT-2 keeps its matrices the other way round
        return base + (added.T if isinstance(self.module, _conv1d()) else added)


def merged(hf: Any, lora: Lora, parameters: dict[str, Tensor]) -> dict[str, Any]:
    """Name in the plain model -> its parameter, or what its adapter makes of it."""
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if any(part in name for part in OURS):
            continue
        owner, _, leaf = name.rpartition(".")
        layer, weight = owner.removesuffix(BASE), leaf == "weight"
        if owner.endswith(BASE) and weight:
            a, b = (parameters[f"{layer}.lora_{x}.{NAME}.weight"] for x in "AB")
            module = hf.get_submodule(owner)
            parameter = Merged(parameter, module, a, b, lora.alpha / lora.rank)  # type: ignore[assignment]
        found[name.replace(BASE, "")] = parameter
    return found


def gathered_adapter(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapters alone, whole, under the names of peft's own files; collective."""
    return {
        f"base_model.model.{name.replace(f'.{NAME}', '')}": _gathered(p).detach().cpu().contiguous()
        for name, p in parameters.items()
        if any(part in name for part in OURS)
    }


def write_adapter(folder: Path, model: Model, tensors: dict[str, Tensor]) -> None:
    """A folder that peft loads beside the model it was made for."""
    from peft import LoraConfig

    assert model.lora is not None
    folder.mkdir(parents=True)
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    LoraConfig(
        r=model.lora.rank,
        lora_alpha=int(model.lora.alpha),
        lora_dropout=model.lora.dropout,
        target_modules=targets,
        base_model_name_or_path=model.source or "..",
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path)
    run_dir.sync_file(path)
    path.chmod((folder / "adapter_config.json").stat().st_mode & 0o777)


def _targets(hf: Any, lora: Lora) -> list[str]:
    """Every linear layer but the head, or those that are named."""
    if lora.targets != "all-linear":
        return list(lora.targets)
    head = hf.get_output_embeddings()
    kinds = (nn.Linear, *_conv1d())
    return sorted({n for n, m in hf.named_modules() if isinstance(m, kinds) and m is not head})


def _conv1d() -> tuple[type, ...]:
    from transformers.pytorch_utils import Conv1D

    return (Conv1D,)


def _narrow(hf: Any, quantisation: str) -> None:
    head = hf.get_output_embeddings()
    for name, module in list(hf.named_modules()):
        if type(module) is nn.Linear and module is not head:
            owner, _, leaf = name.rpartition(".")
            setattr(hf.get_submodule(owner), leaf, _linear(quantisation, module))


def _linear(quantisation: str, like: nn.Linear) -> Any:
    import bitsandbytes as bnb

    sizes = (like.in_features, like.out_features, like.bias is not None)
    if quantisation == "nf4":
        return bnb.nn.Linear4bit(*sizes, quant_type="nf4", device="meta")
    return bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")


def _narrowed(layer: Any, weight: Tensor, device: torch.device) -> Any:
    import bitsandbytes as bnb

    wide: Any
    if device.type == "cpu" and layer.in_features % BLOCK:
        raise UserError(
            f"a matrix is {layer.in_features} wide, and on a CPU bitsandbytes mixes up blocks of "
            f"{BLOCK} where they cross rows",
            f"choose sizes that {BLOCK} divides, or model.quantisation=none",
        )
    if type(layer).__name__ == "Linear4bit":
        wide = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=layer)
    else:
        wide = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return wide.to(device)


def _wide(module: Any, weight: Tensor) -> Tensor:
    if not is_narrow(module):
        return _gathered(weight)
    from peft.utils.integrations import dequantize_module_weight

    return torch.as_tensor(dequantize_module_weight(module))


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
