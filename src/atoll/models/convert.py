"""Weights of older formats become safetensors, once; only tensors are read from pickles."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from atoll import run_dir
from atoll.errors import UserError

# The last digit counts the shards of Meta's checkpoints: parts of each matrix, by these axes.
SPLIT_AXIS = {
    "tok_embeddings.weight": 1, "output.weight": 0, "wq": 0, "wk": 0, "wv": 0, "wo": 1,
    "w1": 0, "w2": 1, "w3": 0,
}  # fmt: skip
NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def convert_pickles(folder: Path) -> None:
    """Give a folder with pytorch_model*.bin the same tensors as safetensors, file by file.

    A file is read with weights_only, so that it can run nothing. Tied tensors are stored once.
    """
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if any(folder.glob("*.safetensors")) or not pickles:
        return
    weight_map: dict[str, str] = {}
    seen: dict[int, str] = {}
    for number, path in enumerate(pickles):
        tensors = {
            name: tensor.contiguous()
            for name, tensor in read_pickle(path).items()
            if seen.setdefault(tensor.data_ptr(), name) == name or not tensor.numel()
        }
        count = len(pickles)
        name = "model.safetensors"
        name = name if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        _save(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    if len(pickles) > 1:
        index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
        run_dir.write_whole(folder / "model.safetensors.index.json", index)
    for path in [*pickles, *folder.glob("pytorch_model*.index.json")]:
        path.unlink()


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin or .pth file; `UserError` for anything else in it."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch raise each their own
        raise UserError(
            f"{path} cannot be read as tensors alone: {str(error).strip().splitlines()[0][:200]}",
            "fetch it again; if it stays so, do not use it: it would run code of its author",
        ) from None
    if not isinstance(found, dict):
        raise UserError(
            f"{path} holds a {type(found).__name__}, not tensors by name", "use another"
        )
    return {str(name): x for name, x in found.items() if isinstance(x, Tensor)}


def is_meta_llama(folder: Path) -> bool:
    """Whether these are Llama's weights as Meta gives them out."""
    return (folder / "params.json").is_file() and any(folder.glob("consolidated.*.pth"))


def convert_llama(folder: Path, into: Path) -> None:
    """Meta's Llama or Llama 2 weights as a Hugging Face folder, a layer at a time.

    Rotary pairs lie side by side there and half a head apart here, so the rows of the queries and
    keys change places.
    """
    params = json.loads((folder / "params.json").read_text())
    parts = [read_pickle(path) for path in sorted(folder.glob("consolidated.*.pth"))]
    config = _llama_config(params, parts)
    into.mkdir(parents=True, exist_ok=True)
    layers, weight_map = int(params["n_layers"]), dict[str, str]()
    for number in range(layers + 1):
        name = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        tensors = _llama_layer(parts, config, None if number == layers else number)
        _save(into / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    run_dir.write_whole(into / "model.safetensors.index.json", index)
    _llama_tokenizer(folder, into)
    run_dir.write_whole(into / "config.json", json.dumps(config, indent=1))


def _llama_config(params: dict[str, Any], parts: list[dict[str, Tensor]]) -> dict[str, Any]:
    heads = int(params["n_heads"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sum(p["output.weight"].shape[0] for p in parts),
        "hidden_size": int(params["dim"]),
        "intermediate_size": sum(p["layers.0.feed_forward.w1.weight"].shape[0] for p in parts),
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


def _llama_layer(
    parts: list[dict[str, Tensor]], config: dict[str, Any], layer: int | None
) -> dict[str, Tensor]:
    """One layer's tensors, or (None) those outside of the layers, under their new names."""
    prefix = "" if layer is None else f"layers.{layer}."
    found = {}
    for name in parts[0]:
        inside = name.startswith("layers.")
        if name == "rope.freqs" or name.endswith("rope.freqs"):
            continue
        if inside == (layer is None) or not name.startswith(prefix):
            continue
        own = name.removeprefix(prefix)
        whole = _joined(own, [part[name] for part in parts])
        for kind, heads in (("wq", "num_attention_heads"), ("wk", "num_key_value_heads")):
            if f".{kind}." in own:
                whole = _half_apart(whole, config[heads])
        found[_renamed(own, layer)] = whole.contiguous()
    return found


def _joined(name: str, pieces: list[Tensor]) -> Tensor:
    axis = next((axis for part, axis in SPLIT_AXIS.items() if part in name), None)
    if len(pieces) == 1 or axis is None or pieces[0].ndim == 1:
        return pieces[0]
    return torch.cat(pieces, dim=axis)


def _half_apart(weight: Tensor, heads: int) -> Tensor:
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _renamed(name: str, layer: int | None) -> str:
    if layer is None:
        return NAMES[name]
    owner, _, leaf = name.rpartition(".")
    return f"model.layers.{layer}.{NAMES[owner]}.{leaf}"


def _llama_tokenizer(folder: Path, into: Path) -> None:
    """Meta's tokenizer.model, which stands beside the weights or one folder up."""
    places = [folder / "tokenizer.model", folder.parent / "tokenizer.model"]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise UserError(
            f"no tokenizer.model in {folder} or beside it",
            "copy it there: it came with the weights",
        )
    run_dir.write_whole(into / "tokenizer.model", found.read_bytes())
    about = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    run_dir.write_whole(into / "tokenizer_config.json", json.dumps(about, indent=1))


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    run_dir.sync_file(partial)
    partial.replace(path)
    run_dir.sync_folder(path.parent)
