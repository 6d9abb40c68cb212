"""Weights of older formats become safetensors, once; only tensors are read from pickles."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll import run_dir
from atoll.errors import UserError
from atoll.models.safetensor_files import (
    INDEX,
    SINGLE,
    file_name,
    tensor_names,
    write_index,
    write_tensors,
)

# Meta's name -> ours, and the axis along which Meta's shards split it (None: each has all of it).
LLAMA_ENDS: dict[str, tuple[str, int | None]] = {
    "tok_embeddings": ("model.embed_tokens", 1),
    "norm": ("model.norm", None),
    "output": ("lm_head", 0),
}
LLAMA_LAYER: dict[str, tuple[str, int | None]] = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
LLAMA_ROTARY = {"attention.wq": "num_attention_heads", "attention.wk": "num_key_value_heads"}


def convert_pickles(folder: Path) -> None:
    """Give a folder with pytorch_model*.bin the same tensors as safetensors, file by file.

    A file is read with weights_only, so that it can run nothing. Tied tensors are stored once. The
    pickles are deleted only when every name is found again in what was written.
    """
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not pickles or (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return
    indices = list(folder.glob("pytorch_model*.index.json"))
    expected = {name for path in indices for name in json.loads(path.read_text())["weight_map"]}
    files: list[list[str]] = []
    written: set[str] = set()
    for number, pickled in enumerate(pickles):
        tensors, tied = _untied(read_pickle(pickled))
        path = folder / file_name(number, len(pickles))
        write_tensors(path, tensors)
        files.append(list(tensors))
        expected |= tensors.keys() | tied
        written |= tied | set(tensor_names(path))
    if missing := sorted(expected - written):
        for number in range(len(pickles)):
            (folder / file_name(number, len(pickles))).unlink()
        raise UserError(
            f"{len(missing)} tensors of {folder} are in no file, the first is {missing[0]}",
            "fetch the model again",
        )
    write_index(folder, files)
    for path in [*pickles, *indices]:
        path.unlink()


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin or .pth file; `UserError` for anything else in it.

    Archives are mapped into memory; the format before torch 1.6, which is none, is read whole.
    """
    try:
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # pickle, zip and torch raise each their own
        harmful = isinstance(error, pickle.UnpicklingError)
        hint = "; if it stays so, do not use it: it would run code of its author" if harmful else ""
        # what torch refused stands last; before it, how to read it all the same
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{path} cannot be read as tensors alone: {lines[-1 if harmful else 0][:200]}",
            f"fetch it again{hint}",
        ) from None
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise UserError(
            f"{path} holds a {type(content).__name__} that is no tensors by name",
            "give the model's state_dict alone",
        )
    return {str(name): tensor for name, tensor in content.items()}


def _untied(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors, each in memory of its own, and the names of those that are another again."""
    views: set[Any] = set()
    storages: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in views:
            continue
        views.add(view)
        compact = tensor.contiguous()
        shares = compact.untyped_storage().data_ptr() in storages
        own[name] = compact.clone() if shares else compact
        storages.add(own[name].untyped_storage().data_ptr())
    return own, tensors.keys() - own.keys()


def is_meta_llama(folder: Path) -> bool:
    """Whether these are Llama's weights as Meta gives them out."""
    return (folder / "params.json").is_file() and any(folder.glob("consolidated.*.pth"))


def convert_llama(folder: Path, into: Path) -> None:
    """Meta's Llama or Llama 2 weights as a Hugging Face folder, a layer at a time.

    Rotary pairs lie side by side there and half a head apart here, so the rows of the queries and
    keys change places.
    """
    params = json.loads((folder / "params.json").read_text())
    shards = [read_pickle(path) for path in sorted(folder.glob("consolidated.*.pth"))]
    layers = int(params["n_layers"])
    _check_llama_names(folder, shards[0], layers)
    config = _llama_config(params, shards)
    into.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = []
    for number in range(layers + 1):
        tensors = _llama_tensors(shards, config, None if number == layers else number)
        write_tensors(into / file_name(number, layers + 1), tensors)
        files.append(list(tensors))
    write_index(into, files)
    _llama_tokenizer(folder, into)
    run_dir.write_whole(into / "config.json", json.dumps(config, indent=1))


def _check_llama_names(folder: Path, shard: dict[str, Tensor], layers: int) -> None:
    expected = {f"{name}.weight" for name in LLAMA_ENDS}
    expected |= {f"layers.{i}.{name}.weight" for i in range(layers) for name in LLAMA_LAYER}
    present = {name for name in shard if not name.endswith("rope.freqs")}
    if differing := sorted(expected ^ present):
        raise UserError(
            f"{differing[0]} is {'missing' if differing[0] in expected else 'unknown'} in the "
            f"weights of {folder}",
            "only Llama and Llama 2 are converted: fetch other models in their Hugging Face format",
        )


def _llama_config(params: dict[str, Any], shards: list[dict[str, Tensor]]) -> dict[str, Any]:
    heads = int(params["n_heads"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sum(s["output.weight"].shape[0] for s in shards),
        "hidden_size": int(params["dim"]),
        "intermediate_size": sum(s["layers.0.feed_forward.w1.weight"].shape[0] for s in shards),
        "num_hidden_layers": int(params["n_layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(params.get("n_kv_heads") or heads),
        "rms_norm_eps": float(params["norm_eps"]),
        "rope_theta": float(params.get("rope_theta", 10000.0)),
        # the files do not say it; Llama 1, of another epsilon, was trained on half as many
        "max_position_embeddings": 2048 if float(params["norm_eps"]) == 1e-6 else 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _llama_tensors(
    shards: list[dict[str, Tensor]], config: dict[str, Any], layer: int | None
) -> dict[str, Tensor]:
    """One layer's tensors, or (None) those outside of the layers, under their new names."""
    table, prefix = (LLAMA_ENDS, "") if layer is None else (LLAMA_LAYER, f"layers.{layer}.")
    new_prefix = "" if layer is None else f"model.{prefix}"
    tensors = {}
    for name, (new_name, axis) in table.items():
        pieces = [shard[f"{prefix}{name}.weight"] for shard in shards]
        weight = pieces[0] if axis is None else torch.cat(pieces, dim=axis)
        if name in LLAMA_ROTARY:
            rows, columns = weight.shape
            heads = config[LLAMA_ROTARY[name]]
            pairs = weight.view(heads, rows // heads // 2, 2, columns)
            weight = pairs.transpose(1, 2).reshape(rows, columns)
        tensors[f"{new_prefix}{new_name}.weight"] = weight.contiguous()
    return tensors


def _llama_tokenizer(folder: Path, into: Path) -> None:
    """Meta's tokenizer.model, which stands beside the weights or one folder up."""
    places = [folder / "tokenizer.model", folder.parent / "tokenizer.model"]
    tokenizer = next((path for path in places if path.is_file()), None)
    if tokenizer is None:
        raise UserError(
            f"no tokenizer.model in {folder} or beside it",
            "copy it there: it came with the weights",
        )
    run_dir.write_whole(into / "tokenizer.model", tokenizer.read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    run_dir.write_whole(into / "tokenizer_config.json", json.dumps(config, indent=1))
