"""Low-rank adapters beside weights that stay, which may be stored in 8 or 4 bits.

peft makes the adapters, bitsandbytes the quantised weights (Dettmers et al. 2023, QLoRA).
"""

import json
import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.errors import UserError, first_line, printable
from atoll.models.classifier import new_head
from atoll.models.nf4 import Nf4Linear, dequantised, quantised, refuse_crossing_blocks
from atoll.models.safetensor_files import write_tensors
from atoll.models.weights import ReadTensor, Slices
from atoll.settings import Lora, Model

BASE = ".base_layer"
NAME = "default"  # what peft calls an adapter that nobody named
LORA = ".lora_"  # in the name of what learns
PREFIX = "base_model.model."  # of names in peft's files
FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
# of peft's settings: what adds more, or in another way, than alpha / rank times B A
OTHER_KINDS = ("use_dora", "use_rslora", "alpha_pattern", "rank_pattern", "lora_bias")
DRAWN = (True, False, "gaussian", "orthogonal", "eva")  # beginnings that leave the model as it is


def adapt(hf: Any, model: Model, compute_dtype: torch.dtype = torch.float32) -> None:
    """Put adapters beside the linear layers of a model on the meta device; they alone learn.

    And the head of a classifier, which is new: it learns whole.
    """
    if model.lora is None:
        return
    from peft import inject_adapter_in_model

    head = new_head(hf.config)
    if model.quantisation != "none":
        _quantise_layers(hf, model.quantisation, hf.get_submodule(head) if head else None)
    try:
        config = _peft_config(
            model.lora, _targets(hf, model.lora), exclude_modules=[head] if head else None
        )
        inject_adapter_in_model(config, hf, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(
            f"model.lora.targets fits no layer: {first_line(error)}",
            "name linear layers of the model, or model.lora.targets=all-linear",
        ) from None
    _refuse_ends(hf)
    _refuse_experts(hf)
    for module in hf.modules():
        if isinstance(module, Nf4Linear):  # peft takes its adapters' type from the weight's
            module.pack(compute_dtype)
    if head:
        hf.get_submodule(head).requires_grad_(True)
    for name, parameter in hf.named_parameters():
        if model.lora.freeze_a and ".lora_A." in name:
            parameter.requires_grad_(False)
    if model.lora.start is not None:  # here, where the model is whole
        own = {name_in_file(name) for name, _ in hf.named_parameters() if is_adapters(name, head)}
        _refuse_other_start(model.lora.start, model.lora, own)


def _refuse_ends(hf: Any) -> None:
    """Raise `UserError` for adapters beside what is read without its layer: they learn nothing."""
    ends = (hf.get_input_embeddings(), hf.get_output_embeddings())
    names = [name for name, module in hf.named_modules() if any(module is end for end in ends)]
    adapted = [name for name in names if hasattr(hf.get_submodule(name), "base_layer")]
    if adapted:
        last = adapted[0].rpartition(".")[2]
        raise UserError(
            f"model.lora.targets names {last}, whose weight is read past its layer: an adapter "
            "beside it would learn nothing",
            f"leave {last} out of model.lora.targets",
        )


def _targets(hf: Any, lora: Lora) -> list[str] | str:
    """Without what peft adds to all linear layers of a mixture: experts, which are parameters."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    if lora.targets != "all-linear":
        return lora.targets
    config = _peft_config(lora, lora.targets)
    convert_peft_config_for_transformers(config, hf, None)
    return sorted(config.target_modules) if config.target_parameters else lora.targets


def _refuse_experts(hf: Any) -> None:
    """Raise `UserError` for adapters beside parameters: nothing merges them, or reads them back."""
    from peft.tuners.lora.layer import ParamWrapper

    if any(isinstance(module, ParamWrapper) for module in hf.modules()):
        raise UserError(
            "model.lora.targets names experts or a router, which are parameters: no export could "
            "hold their adapters",
            "name the attention: model.lora.targets=[q_proj,k_proj,v_proj,o_proj]",
        )


def check_device(quantisation: str, device: torch.device) -> None:
    """Raise `UserError` where this device cannot multiply with weights of so few bits."""
    if quantisation == "none":
        return
    try:
        layer = _linear(quantisation, nn.Linear(64, 64, bias=False, device="meta"))
        if isinstance(layer, Nf4Linear):
            layer.pack(torch.float32)
            packed, layer.scales = quantised(torch.ones(64, 64), device)
            layer.weight = nn.Parameter(packed.view(torch.float32).view(64, -1), False)
        else:
            layer.weight = _int8(torch.ones(64, 64), device)
        # more rows than one: a single one takes a way that only inference has
        layer(torch.ones(4, 64, device=device, requires_grad=True)).sum().backward()
    except Exception as error:  # bitsandbytes fails in many ways where it lacks a backend
        raise UserError(
            f"model.quantisation={quantisation} does not work on this {device.type}: "
            f"{type(error).__name__}: {first_line(error)[:200]}",
            "install bitsandbytes for this device, or set model.quantisation=none",
        ) from error


def adapted_reader(
    read: ReadTensor, seed: int, shapes: dict[str, tuple[int, ...]], lora: Lora | None
) -> ReadTensor:
    """Adapters begin as no change at all: A at random, B zero; all else as `read` gives it.

    Or as those in the folder `lora.start`; `UserError` where they are of other layers or rank.
    """
    start = None if lora is None else lora.start
    begun = {} if start is None else read_adapter(start)

    def part(name: str, slices: Slices) -> Tensor:
        stored = begun.get(name_in_file(name))
        is_other = stored is not None and tuple(stored.shape) != shapes[name]
        if is_other or (stored is None and begun and LORA in name):
            shape = "nothing" if stored is None else tuple(stored.shape)
            raise UserError(
                f"{start} has {shape} for {name}, the model {shapes[name]}",
                "give an adapter of this model's layers and of model.lora.rank",
            )
        if stored is not None:
            return stored[slices]
        if ".lora_B." in name:
            return torch.zeros(shapes[name])[slices]
        if ".lora_A." in name:
            matrix = torch.empty(shapes[name])
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
            return matrix[slices]
        return read(name.replace(BASE, ""), slices)

    return part


def _refuse_other_start(start: Path, lora: Lora, own: Collection[str]) -> None:
    """An adapter to begin with has tensors of this model alone, and adds them as ours would be.

    own: the names in a file of all that learns, of the whole model.
    """
    more = sorted(read_adapter(start).keys() - set(own))
    if more:
        raise UserError(
            f"{start} has {more[0]} and {len(more) - 1} others that are not in this model's own",
            "give an adapter of this model's layers, or name all of its model.lora.targets",
        )
    path = start / SETTINGS
    try:
        made_with = json.loads(path.read_text()) if path.is_file() else {}
        alpha = float(made_with.get("lora_alpha", lora.alpha))
        others = {name: made_with[name] for name in OTHER_KINDS if made_with.get(name)}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no adapter's settings: {first_line(error)}", "give one that peft has saved"
        ) from None
    drawn = made_with.get("init_lora_weights", True)
    if made_with.get("peft_type", "LORA") != "LORA" or drawn not in DRAWN or others:
        kind = others or {n: made_with.get(n) for n in ("peft_type", "init_lora_weights")}
        words = ", ".join(f"{name}={value}" for name, value in kind.items())
        raise UserError(
            f"{start} was made with {printable(words, 200)}", "give a plain adapter of peft's LoRA"
        )
    if alpha != lora.alpha:
        raise UserError(
            f"{start} was made with lora_alpha={alpha:g}, model.lora.alpha is {lora.alpha:g}",
            f"set it to the same: alpha={alpha:g}",
        )


def merging_reader(read: ReadTensor, hf: Any, lora: Lora, folder: Path) -> ReadTensor:
    """Whole parameters of the plain model `hf`, each with its adapter in `folder` added."""
    adapter = read_adapter(folder)

    def part(name: str, slices: Slices) -> Tensor:
        if (learned := adapter.get(f"{PREFIX}{name}")) is not None:  # a classifier's head
            return learned[slices]
        owner, base = name.removesuffix(".weight"), read(name, slices)
        a, b = (adapter.get(f"{PREFIX}{owner}.lora_{x}.weight") for x in "AB")
        if a is None or b is None:
            return base
        whole = Merged(base, hf.get_submodule(owner), a, b, lora.alpha / lora.rank)
        return whole.full_tensor()

    return part


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder, in fp32; `UserError` where there is none."""
    path = folder / FILE
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read as an adapter: {first_line(error)}",
            "give the folder of one, as RUN/export/adapter",
        ) from error


def name_in_file(name: str) -> str:
    """Of a parameter of an adapted model, its name in peft's files."""
    return f"{PREFIX}{name.replace(f'.{NAME}', '')}"


def is_adapters(name: str, head: str | None) -> bool:
    """Whether a parameter goes with the adapter: of one, or of a classifier's head."""
    return LORA in name or bool(head and name.startswith(f"{head}."))


def fill_int8(hf: Any, read: ReadTensor, device: torch.device) -> None:
    """Read, quantise and place one matrix at a time: in full they are never there together."""
    for name, module in hf.named_modules():
        if _is_int8(module):
            everything = (slice(0, module.out_features), slice(0, module.in_features))
            module.weight = _int8(read(f"{name}.weight", everything), device)


@dataclass(frozen=True)
class Merged:
    """A matrix with its adapter added, made when it is asked for."""

    base: Tensor
    module: Any  # that holds it
    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    def numel(self) -> int:
        return self.a.shape[1] * self.b.shape[0]

    def full_tensor(self) -> Tensor:
        """Collective where the parts are sharded."""
        base = _dequantised(self.module, self.base).float()
        added = self.scale * (full_tensor(self.b).float() @ full_tensor(self.a).float())
        # GPT-2 keeps its matrices the other way round
        return base + (added.T if type(self.module).__name__ == "Conv1D" else added)


def merged(hf: Any, lora: Lora, parameters: dict[str, Tensor]) -> dict[str, Any]:
    """Name in the plain model -> its parameter, or what its adapter makes of it."""
    plain: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if LORA in name:
            continue
        plain[name.replace(BASE, "")] = parameter
        if name.endswith(f"{BASE}.weight"):
            owner = name.removesuffix(".weight")
            layer = owner.removesuffix(BASE)
            a, b = (parameters[f"{layer}.lora_{x}.{NAME}.weight"] for x in "AB")
            matrix = Merged(parameter, hf.get_submodule(owner), a, b, lora.alpha / lora.rank)
            plain[f"{layer}.weight"] = matrix
    return plain


def gathered_adapter(parameters: dict[str, Tensor], head: str | None = None) -> dict[str, Tensor]:
    """The adapters and a classifier's head, whole, by the names of peft's files; collective."""
    return {
        name_in_file(name): full_tensor(p).cpu().contiguous()
        for name, p in parameters.items()
        if is_adapters(name, head)
    }


def full_tensor(parameter: Any) -> Tensor:
    """A parameter, put together where ranks hold its parts; collective then."""
    is_part = isinstance(parameter, DTensor | Merged)
    tensor: Tensor = parameter.full_tensor() if is_part else parameter
    return tensor.detach()


def write_adapter(
    folder: Path, model: Model, tensors: dict[str, Tensor], head: str | None = None
) -> None:
    """A folder that peft loads beside the model it was made for; head: of a classifier."""
    assert model.lora is not None
    folder.mkdir(parents=True)
    adapters = [name.split(LORA)[0] for name in tensors if LORA in name]
    task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if head:
        task = {"task_type": "SEQ_CLS", "modules_to_save": [head]}
    config = _peft_config(
        model.lora,
        sorted({name.rpartition(".")[2] for name in adapters}),
        base_model_name_or_path=model.source or "..",
        revision=model.revision,
        inference_mode=True,
        **task,
    )
    config.save_pretrained(str(folder))
    stays = [name for name in tensors if model.lora.freeze_a and ".lora_A." in name]
    write_tensors(folder / FILE, tensors, stays)


def _peft_config(lora: Lora, targets: list[str] | str, **more: Any) -> Any:
    """What peft makes adapters of: the same for training and for the folder it loads."""
    from peft import LoraConfig

    # peft takes any number, other readers of the file would rather have a whole one
    alpha: Any = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        **more,
    )


def _quantise_layers(hf: Any, quantisation: str, new: nn.Module | None) -> None:
    heads = (hf.get_output_embeddings(), new)
    for name, module in list(hf.named_modules()):
        if type(module) is nn.Linear and not any(module is head for head in heads):
            owner, _, leaf = name.rpartition(".")
            setattr(hf.get_submodule(owner), leaf, _linear(quantisation, module))


def _linear(quantisation: str, like: nn.Linear) -> Any:
    import bitsandbytes as bnb

    sizes = (like.in_features, like.out_features, like.bias is not None)
    if quantisation == "nf4":
        return Nf4Linear(*sizes, device="meta")
    return bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")


def _is_int8(module: Any) -> bool:
    return type(module).__name__ == "Linear8bitLt" and not hasattr(module, "base_layer")


def _int8(weight: Tensor, device: torch.device) -> Any:
    import bitsandbytes as bnb

    refuse_crossing_blocks(weight, device)
    parameter: Any = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return parameter.to(device)


def _dequantised(module: Any, weight: Tensor) -> Tensor:
    """The matrix itself; collective where its parts are sharded."""
    if isinstance(module, Nf4Linear):
        return dequantised(module, full_tensor(weight))
    if not _is_int8(module):
        return full_tensor(weight)
    from peft.utils.integrations import dequantize_module_weight

    return torch.as_tensor(dequantize_module_weight(module))
