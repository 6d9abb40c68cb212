"""Files of other tools' layouts are read, and written again: experts one by one, older names."""

import copy
from pathlib import Path

import families
import pytest
import small_export
import small_run
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from atoll.data import vocabulary
from atoll.models import export
from atoll.models.build import build_config, skeleton, weights_for
from atoll.models.safetensor_files import file_name, write_tensors
from atoll.models.stored_names import as_stored, names_as_stored, stored_dtype
from atoll.models.weights import stored_buffers
from atoll.settings import Model
from atoll.train.untrained import write_untrained

CASES = [
    name if name in families.OF_EACH_KIND else pytest.param(name, marks=pytest.mark.full)
    for name in families.FAMILIES
]


# families that load some of a router's numbers in fp32, and their names
EXPERTS = families.EXPERTS | {"first_k_dense_replace": 1}
KEPT = {
    "glm4_moe": (
        EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16},
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ),
    "ernie4_5_moe": (
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
        "model.layers.1.mlp.gate.weight",
    ),
}


def saved(name: str, folder: Path) -> torch.nn.Module:
    """What transformers saves of a random model: what the hub has."""
    config = build_config(
        Model(name="x", config=families.config_of(name)), tiny.VOCABULARY, tiny.SEQUENCE, {}
    )
    torch.manual_seed(3)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    hf.save_pretrained(folder)
    return hf.eval()


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saved_is_read(name: str, tmp_path: Path) -> None:
    hf = saved(name, tmp_path)
    settings = Model(name="x", source=str(tmp_path))
    config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
    with weights_for(settings, config, 0) as read:
        for parameter, value in (dict(hf.named_parameters()) | stored_buffers(hf)).items():
            if value.ndim == 0:
                assert torch.equal(read(parameter, ()), value), parameter
                continue
            rows = slice(value.shape[0] // 2, value.shape[0])
            slices = (rows, *(slice(0, size) for size in value.shape[1:]))
            assert torch.equal(read(parameter, slices), value[rows]), parameter


@pytest.mark.parametrize("name", CASES)
def test_an_export_has_the_names_of_the_hub_and_the_same_logits(name: str, tmp_path: Path) -> None:
    hf = saved(name, tmp_path / "hub")
    empty = skeleton(copy.deepcopy(hf.config))
    weights = {n: p.detach() for n, p in hf.named_parameters()} | stored_buffers(hf)
    stored = as_stored(empty, weights)
    published = {n for path in (tmp_path / "hub").glob("*.safetensors") for n in load_file(path)}
    assert set(stored) == published
    assert names_as_stored(empty, {n: w.shape for n, w in weights.items()}) == list(stored)
    tokenizer, folder = tmp_path / "tokenizer", tmp_path / "export"
    tokenizer.mkdir()
    folder.mkdir()
    write_tensors(folder / file_name(0, 1), stored)
    export.write_rest(
        folder, hf.config, type(hf).__name__, torch.float32, [list(stored)], 1, tokenizer
    )
    again = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", trust_remote_code=False
    )
    tokens = torch.randint(3, families.VOCABULARY, (2, 20))
    with torch.no_grad():
        logits, expected = again(tokens).logits, hf(tokens).logits
    # mapped weights begin elsewhere in memory, which changes the order of a sum
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", KEPT)
def test_what_a_family_has_in_fp32_is_not_rounded(family: str, tmp_path: Path) -> None:
    changes, name = KEPT[family]
    sizes = families.COMMON | {"vocab_size": 300} | changes
    torch.manual_seed(3)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for tensor in stored_buffers(hf).values():
        tensor.normal_()
    hf.save_pretrained(tmp_path / "hub")
    vocabulary.save(small_export.small_words(), tmp_path / "hub")
    small_run.write_text(tmp_path)
    model = {"name": family, "source": str(tmp_path / "hub")}
    single = small_run.sharding("single")
    run = small_run.settings(tmp_path, 1, model=model, sharding=single, export__dtype="bfloat16")
    write_untrained(run, tmp_path / "export")
    [before], [after] = (
        [tensors for path in folder.glob("*.safetensors") for tensors in [load_file(path)]]
        for folder in (tmp_path / "hub", tmp_path / "export")
    )
    assert after[name].dtype == torch.float32 and torch.equal(after[name], before[name])
    assert after["model.norm.weight"].dtype == torch.bfloat16
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=False)
    kept = dict(again.named_parameters()) | stored_buffers(again)
    assert torch.equal(kept[name], before[name])
    assert {n for n, t in kept.items() if t.dtype == torch.float32} == {
        n for n in kept if stored_dtype(again, n, torch.bfloat16) == torch.float32
    }
