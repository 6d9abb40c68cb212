"""Weights into a model built on the meta device, slice by slice.

No rank ever holds more of the model than its own shards and one block (random weights) or one
slice (stored weights).
"""

import copy
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from atoll.errors import UserError
from atoll.models.mup import Widths
from atoll.models.parts import Parts
from atoll.models.safetensor_files import corrupted, weight_files
from atoll.models.stored_names import Origin, maker, origins
from atoll.models.tiny_copy import tiny_copy

Slices = tuple[slice, ...]
# (parameter's name, the part wanted) -> that part
ReadTensor = Callable[[str, Slices], Tensor]


def materialize(
    model: nn.Module, device: torch.device, of_buffers: torch.device | None = None
) -> None:
    """Give every meta parameter and buffer memory on `device`, keeping tied weights tied.

    of_buffers: where buffers go, where parameters wait elsewhere until they are computed with.
    """
    placed: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor  # it was read and quantised already
        place = device if isinstance(tensor, nn.Parameter) else of_buffers or device
        return placed.setdefault(id(tensor), torch.empty_like(tensor, device=place))

    tied = _tied_names(model)
    model._apply(real)
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)


@torch.no_grad()
def fill(model: nn.Module, read: ReadTensor, filled: Collection[str] = ()) -> None:
    """Copy into each parameter of the Hugging Face model the slice this rank holds.

    filled: names of those that have their values already.
    """
    for name, parameter in model.named_parameters():
        local, slices = local_part(parameter)
        if local.numel() and local.is_floating_point() and name not in filled:
            local.copy_(read(name, slices))
    fill_stored_buffers(model, read)


@torch.no_grad()
def fill_stored_buffers(model: nn.Module, read: ReadTensor) -> None:
    """Copy what files have beside the parameters, and no checkpoint has."""
    for name, buffer in stored_buffers(model).items():
        buffer.copy_(read(name, tuple(slice(0, size) for size in buffer.shape)))


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that files have beside the parameters: biases of routers, slopes of activations."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
        if buffer.is_floating_point()
    }


@torch.no_grad()
def fill_buffers(hf: Any) -> None:
    """Compute what no file stores: rotary frequencies, position indices, embeddings' scales."""
    for module in hf.modules():
        if any(True for _ in module.buffers(recurse=False)):
            with _stored_kept(module):
                hf._init_weights(module)


@contextmanager
def _stored_kept(module: nn.Module) -> Iterator[None]:
    """While other buffers are made, shapes without memory stand in for what files have."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for name, parameter in parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(_without_memory(parameter), False)
    computed = module._non_persistent_buffers_set
    stored = {n: b for n, b in buffers.items() if b is not None and n not in computed}
    for name, buffer in stored.items():
        module._buffers[name] = _without_memory(buffer)
    try:
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(stored)


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def random_reader(skeleton: Any, parts: Parts, seed: int) -> ReadTensor:
    """Weights as transformers would initialise them, the same for any sharding and world size.

    Each block (or each module outside the blocks) is drawn from a seed of its own name.
    """

    @lru_cache(maxsize=1)
    def drawn(unit: str) -> dict[str, Tensor]:
        return _drawn(skeleton, unit, seed)

    # where a pipeline has the head apart from the embedding that it is
    tied: dict[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}

    def part(name: str, slices: Slices) -> Tensor:
        name = tied.get(name, name)
        return drawn(_unit_of(name, parts.blocks))[name][slices]

    return part


def scaled_reader(read: ReadTensor, widths: Widths) -> ReadTensor:
    """The same weights, as muP would have them begin."""

    def part(name: str, slices: Slices) -> Tensor:
        tensor = read(name, slices)
        scale = widths.scale(name, tensor).initial
        return tensor if scale == 1.0 else tensor * scale

    return part


@contextmanager
def stored_reader(
    folder: Path, hf: Any, new: str | None = None, random: ReadTensor | None = None
) -> Iterator[ReadTensor]:
    """Slices read straight from safetensors files; names of older files are understood.

    The weights of module `new`, and buffers, are `random` ones where the files have none; of `new`
    also where they are of another shape, for another number of labels. A head that is tied in the
    folder and not in the model begins as the embedding. Tokens that the folder's vocabulary lacks
    begin as the mean of those it has (Hewitt 2021, "Initializing new word embeddings").
    """
    from safetensors import SafetensorError, safe_open

    files, tied = weight_files(folder), _tied_in_files(hf, folder)
    before = _vocabulary_of(folder)
    with ExitStack() as stack:

        @cache
        def opened(path: Path) -> Any:
            return stack.enter_context(safe_open(path, framework="pt"))

        @cache
        def made_of() -> dict[str, Origin]:
            return origins(hf, files)

        make = maker(hf, lambda name: opened(files[name]).get_tensor(name))

        def read(name: str, slices: Slices) -> Tensor:
            is_new = new is not None and name.startswith(new + ".")
            stored = next((n for n in _candidates(name, hf, tied) if n in files), None)
            if stored is None:
                for candidate in _candidates(name, hf, tied):
                    if candidate in made_of():
                        whole = make(made_of()[candidate], candidate)
                        _check_shape(name, tuple(whole.shape), hf, folder)
                        return whole[slices]
                if random is not None and (is_new or name in stored_buffers(hf)):
                    return random(name, slices)
                raise UserError(
                    f"the weights in {folder} lack {name}",
                    "check that config.json and the weights belong together",
                )
            path = files[stored]
            try:
                part = opened(path).get_slice(stored)
            except SafetensorError as error:
                raise corrupted(path, error) from error
            shape = tuple(part.get_shape())
            if before is not None and _is_grown(hf, name, shape, before):
                return _with_new_rows(part, before, slices)
            if is_new and random is not None and shape != _shape_of(hf, name):
                return random(name, slices)
            _check_shape(name, shape, hf, path)
            result: Tensor = part[slices] if slices else opened(path).get_tensor(stored)
            return result

        yield read


def stored_rows(folder: Path, module: str) -> int | None:
    """How many outputs a module's weight in the files has; None where there is none."""
    from safetensors import SafetensorError, safe_open

    path = weight_files(folder).get(f"{module}.weight")
    if path is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.get_slice(f"{module}.weight").get_shape()[0])
    except SafetensorError as error:
        raise corrupted(path, error) from error


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def local_part(parameter: Tensor) -> tuple[Tensor, Slices]:
    """What this rank holds of a parameter, and which slices of the whole that is."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    slices = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
    return parameter.to_local(), slices


def _unit_of(name: str, blocks: str) -> str:
    if name.startswith(blocks + "."):
        return ".".join(name.split(".")[: blocks.count(".") + 2])
    return name.rpartition(".")[0]


def _drawn(skeleton: Any, unit: str, seed: int) -> dict[str, Tensor]:
    module = copy.deepcopy(skeleton.get_submodule(unit)).to_empty(device="cpu")
    own = dict(module.named_parameters()) | stored_buffers(module)
    for tensor in own.values():
        tensor.data.fill_(float("nan"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}:{unit}".encode()))
        module.apply(skeleton._init_weights)
    drawn = {f"{unit}.{name.lstrip('.')}": tensor.data for name, tensor in own.items()}
    missing = [name for name, tensor in drawn.items() if not tensor.isfinite().all()]
    for name, value in zip(missing, constructed(skeleton, missing), strict=True):
        drawn[name].copy_(value)
    return drawn


def constructed(hf: Any, names: list[str]) -> list[Tensor]:
    """What a model's constructor gives to parameters and buffers that nothing else initialises.

    They are of no layer's width (slopes of an activation), so a small copy has the same.
    """
    if not names:
        return []
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        small: Any = AutoModelForCausalLM.from_config(
            tiny_copy(hf.config),
            attn_implementation="eager",
            dtype=torch.float32,
            trust_remote_code=False,
        )
    values = dict(small.named_parameters()) | dict(small.named_buffers())
    in_small = {name: re.sub(r"\.\d+\.", ".0.", name) for name in names}
    missing = [name for name, of_small in in_small.items() if of_small not in values]
    assert not missing, f"transformers initialises no value for {missing}"
    return [values[of_small].detach() for of_small in in_small.values()]


def _tied_in_files(hf: Any, folder: Path) -> dict[str, str]:
    """Parameters that are stored once: those that the model ties, or that the folder's own ties."""
    from transformers import AutoConfig

    tied: dict[str, str] = getattr(hf, "all_tied_weights_keys", None) or {}
    if tied or not (folder / "config.json").is_file():
        return tied
    if not AutoConfig.from_pretrained(folder, trust_remote_code=False).tie_word_embeddings:
        return {}
    return dict(getattr(hf, "_tied_weights_keys", None) or {})


def _vocabulary_of(folder: Path) -> int | None:
    path = folder / "config.json"
    return json.loads(path.read_text()).get("vocab_size") if path.is_file() else None


def _is_grown(hf: Any, name: str, stored: tuple[int, ...], before: int) -> bool:
    """Whether a parameter has a row for each token, and the model more of them than the file."""
    rows, *rest = _shape_of(hf, name) or (0,)
    grown = stored[:1] == (before,) and before < rows == hf.config.vocab_size
    return bool(grown and stored[1:] == tuple(rest))


def _with_new_rows(stored: Any, before: int, slices: Slices) -> Tensor:
    rows, others = slices[0], slices[1:]
    own: Slices = (slice(min(rows.start, before), min(rows.stop, before)), *others)
    known: Tensor = stored[own]
    new = rows.stop - max(rows.start, before)
    if new <= 0:
        return known
    every: Slices = (slice(0, before), *others)
    # in fp64, so that it is the same however the columns are divided
    mean = stored[every].double().mean(0, keepdim=True).to(known.dtype)
    return torch.cat([known, mean.expand(new, *mean.shape[1:])])


def _candidates(name: str, hf: Any, tied: dict[str, str]) -> Iterator[str]:
    """The names a parameter may bear: its own or a tied one's, older spellings, with or
    without the prefix of the backbone."""
    partners = [b for pair in tied.items() for a, b in (pair, pair[::-1]) if a == name]
    prefix = hf.base_model_prefix + "."
    for own in (name, *partners):
        for candidate in (own, own.removeprefix(prefix), prefix + own):
            yield candidate
            yield candidate.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )


def _shape_of(hf: Any, name: str) -> tuple[int, ...]:
    owner, _, leaf = name.rpartition(".")
    return tuple(getattr(hf.get_submodule(owner), leaf).shape)


def _check_shape(name: str, stored: tuple[int, ...], hf: Any, path: Path) -> None:
    expected = _shape_of(hf, name)
    if stored != expected:
        raise UserError(
            f"{name} has shape {stored} in {path.name}, the configuration says {expected}",
            "check that config.json (or model.config) and the weights belong together",
        )
