"""config.json and tokenizer_config.json as transformers 4 and 5 both read them.

What reads exports on clusters (vLLM, llama.cpp, lm-evaluation-harness) is often older than what
wrote them: transformers 4 passes over `rope_parameters`, and takes theta 10,000 without a word.
"""

import json
from pathlib import Path
from typing import Any

from atoll import run_dir

# model type -> what transformers 4 calls its theta and the share of a head that turns
OLDER_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
NAMES = ("rope_theta", "partial_rotary_factor")
# the kinds of positions of transformers 4, which knows no family with another one
KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# what transformers 5 calls a tokenizer that is its tokenizer.json, and what 4 and 5 do
TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
PHI3 = ("type", "short_factor", "long_factor")  # what 4 takes of its scaled positions


def write_config(folder: Path, config: Any) -> None:
    """The configuration with both generations' fields."""
    stored = json.loads(config.to_json_string())
    _write(folder / "config.json", stored | older_fields(stored))


def older_fields(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 4 reads where 5 has `rope_parameters`, `dtype` and `num_local_experts`."""
    fields = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    if "num_local_experts" in config:  # of Qwen's mixtures, where 4 takes 128 without a word
        fields["num_experts"] = config["num_local_experts"]
    rope = config.get("rope_parameters") or {}
    # one for each kind of layer, as in Gemma 3
    whole = rope.get("full_attention", rope)
    if whole.get("rope_type", "default") not in KINDS:
        return fields
    if "sliding_attention" in rope:
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    theta, share = OLDER_NAMES.get(config.get("model_type", ""), NAMES)
    outside = {"rope_theta": theta, "partial_rotary_factor": share}
    fields |= {older: whole[name] for name, older in outside.items() if name in whole}
    if whole.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {n: value for n, value in whole.items() if n not in outside}
    if config.get("model_type") == "phi3" and "rope_scaling" in fields:
        scaling = fields["rope_scaling"] | {"type": whole["rope_type"]}
        fields["rope_scaling"] = {name: scaling[name] for name in PHI3 if name in scaling}
    return fields


def write_tokenizer_config(folder: Path) -> None:
    """The tokenizer's class and special tokens by names that both know, where a file says them."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    stored = json.loads(path.read_text())
    kind = stored.get("tokenizer_class")
    stored["tokenizer_class"] = TOKENIZER_CLASSES.get(kind, kind)
    # a list in 5, a mapping in 4
    if isinstance(special := stored.get("extra_special_tokens"), list):
        del stored["extra_special_tokens"]
        stored["additional_special_tokens"] = special
    if (words := folder / "tokenizer.json").is_file():
        added = json.loads(words.read_text())["added_tokens"]
        known = {str(token.pop("id")): token for token in added}
        stored["added_tokens_decoder"] = stored.get("added_tokens_decoder") or known
    _write(path, stored)


def write_end_ids(path: Path, end_ids: list[int]) -> None:
    """Generation stops at these tokens too; what else the file says stays."""
    stored = json.loads(path.read_text()) if path.is_file() else {}
    known = stored.get("eos_token_id", [])
    ids = known if isinstance(known, list) else [known]
    _write(path, stored | {"eos_token_id": [*dict.fromkeys([*ids, *end_ids])]})


def _write(path: Path, content: dict[str, Any]) -> None:
    run_dir.write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
