"""Older files become safetensors once, and nothing in them runs."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from pieces import write_pieces
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atoll.errors import UserError
from atoll.models import convert
from atoll.models.convert import convert_llama, convert_pickles, is_meta_llama
from atoll.models.safetensor_files import weight_files


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
@pytest.mark.parametrize("parts", [1, 2])
def test_pickles_are_read_once_and_give_the_same_model(
    tmp_path: Path, architecture: str, parts: int
) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model(**tiny.CONFIGS[architecture])
    theirs = AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(tmp_path)
    names = list(theirs.state_dict())
    state = theirs.state_dict()
    for number in range(parts):
        some = {name: state[name] for name in names[number::parts]}
        suffix = "" if parts == 1 else f"-{number + 1:05d}-of-{parts:05d}"
        torch.save(some, tmp_path / f"pytorch_model{suffix}.bin")
    convert_pickles(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = tiny.batch(1).tokens_BT
    torch.testing.assert_close(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    trap = tmp_path / "made_by_the_pickle"
    torch.save({"weight": torch.ones(2), "x": Harmful(trap)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read as tensors alone"):
        convert_pickles(tmp_path)
    assert not trap.exists()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(trap)))
    with pytest.raises(UserError, match="cannot be read as tensors alone"):
        convert_pickles(tmp_path)
    assert not trap.exists()


def test_files_without_an_archive_are_read_too(tmp_path: Path) -> None:
    """Those of torch before 1.6, which cannot be mapped."""
    old = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    convert_pickles(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [1, 1]
    assert not old.exists()


@pytest.mark.parametrize("content", [b"", "half"])
def test_a_file_that_is_cut_is_not_called_harmful(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000] if content == "half" else content)
    with pytest.raises(UserError) as caught:
        convert_pickles(tmp_path)
    assert "cannot be read as tensors alone" in caught.value.found
    assert caught.value.hint == "fetch it again"
    assert path.exists()


def test_every_file_keeps_its_tensors(tmp_path: Path) -> None:
    """A file's memory is used again for the file after the next."""
    count = 6
    for number in range(count):
        weights = {f"weight_{number}": torch.full((3000,), float(number))}
        torch.save(weights, tmp_path / f"pytorch_model-{number + 1:05d}-of-{count:05d}.bin")
    convert_pickles(tmp_path)
    stored = {n: x for path in tmp_path.glob("*.safetensors") for n, x in load_file(path).items()}
    assert {name: float(x[0]) for name, x in stored.items()} == {
        f"weight_{number}": float(number) for number in range(count)
    }


def test_parts_of_one_memory_are_all_written(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    parts = {"whole": whole, "tied": whole, "rows": whole[:2], "end": whole[2:], "turned": whole.T}
    torch.save(parts, tmp_path / "pytorch_model.bin")
    convert_pickles(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == parts.keys() - {"tied"}, "a tied tensor is stored once"
    for name, tensor in stored.items():
        assert torch.equal(tensor, parts[name]), name


def test_what_is_no_tensor_by_name_is_kept_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"step": 3, "model": {"weight": torch.ones(2)}}, path)
    with pytest.raises(UserError, match="no tensors by name"):
        convert_pickles(tmp_path)
    assert path.exists()


def test_pickles_stay_unless_every_name_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, index = tmp_path / "pytorch_model.bin", tmp_path / "pytorch_model.bin.index.json"
    torch.save({"first": torch.ones(2)}, path)
    index.write_text(json.dumps({"weight_map": {"first": path.name, "second": "of another file"}}))
    with pytest.raises(UserError, match=r"1 tensors of .* the first is second"):
        convert_pickles(tmp_path)
    index.unlink()
    assert not list(tmp_path.glob("*.safetensors")), "nor does a part pass for the whole"
    monkeypatch.setattr(convert, "write_tensors", lambda path, _: save_file({}, path))
    with pytest.raises(UserError, match=r"1 tensors of .* the first is first"):
        convert_pickles(tmp_path)
    assert path.exists()


def test_a_conversion_goes_on_where_it_broke(tmp_path: Path) -> None:
    paths = [tmp_path / f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    torch.save({"first": torch.ones(2)}, paths[0])
    paths[1].write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot be read as tensors"):
        convert_pickles(tmp_path)
    torch.save({"second": torch.ones(2)}, paths[1])
    convert_pickles(tmp_path)
    assert weight_files(tmp_path).keys() == {"first", "second"}
    assert not list(tmp_path.glob("*.bin"))


def meta_state(model: Any, heads: int) -> dict[str, torch.Tensor]:
    """The same weights under Meta's names, with the pairs of rotary rows side by side."""
    table = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "lm_head": "output",
    }
    found = {}
    for name, weight in model.state_dict().items():
        groups = {"q_proj": heads, "k_proj": model.config.num_key_value_heads}
        for kind, count in groups.items():
            if kind in name:
                rows, columns = weight.shape
                halves = weight.view(count, 2, rows // count // 2, columns)
                weight = halves.transpose(1, 2).reshape(rows, columns)
        new = name.replace("model.layers", "layers")
        for ours, theirs in table.items():
            new = new.replace(ours, theirs)
        found[new] = weight
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_metas_llama_gives_the_same_logits(tmp_path: Path, shards: int) -> None:
    torch.manual_seed(3)
    sizes = tiny.CONFIGS["llama"] | {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).eval()
    config = theirs.config
    state = meta_state(theirs, config.num_attention_heads)
    meta, ours = tmp_path / "meta", tmp_path / "hf"
    meta.mkdir()
    cut_columns = ("tok_embeddings", "attention.wo", "feed_forward.w2")
    for shard in range(shards):
        part = {
            name: x
            if x.ndim == 1
            else x.chunk(shards, 1 if any(c in name for c in cut_columns) else 0)[shard].clone()
            for name, x in state.items()
        }
        torch.save(part | {"rope.freqs": torch.ones(4)}, meta / f"consolidated.{shard:02d}.pth")
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": 1e-5,
        "vocab_size": -1,
    }
    (meta / "params.json").write_text(json.dumps(params))
    assert is_meta_llama(meta)
    with pytest.raises(UserError, match=r"no tokenizer\.model"):
        convert_llama(meta, ours)
    pieces = write_pieces(meta / "tokenizer.model")
    convert_llama(meta, ours)
    tokenizer = AutoTokenizer.from_pretrained(ours)
    assert tokenizer.is_fast
    assert tokenizer("a reef of coral")["input_ids"] == [1, *pieces.encode("a reef of coral")]
    loaded = AutoModelForCausalLM.from_pretrained(ours).eval()
    tokens = tiny.batch(1).tokens_BT
    torch.testing.assert_close(loaded(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    assert all(load_file(path) for path in ours.glob("*.safetensors"))
