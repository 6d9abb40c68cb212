"""The model of round 0: copied or drawn tensor by tensor, without data, a run or much memory."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from chat_templates import TEMPLATES
from safetensors.torch import load_file, save_file
from test_federate import MODEL, TINY, settings
from transformers import AutoTokenizer

from atoll.campaign.first_model import make_first_model
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.config.compose import path_word
from atoll.errors import UserError
from atoll.proof.statement import OWN

NO_TEXT = "data.files=[/nowhere/*.txt]"


def store_of(folder: Path, start: list[str]) -> CampaignStore:
    campaign = checked_campaign(settings(folder, start=start))
    return CampaignStore(campaign, folder / "campaigns" / "c")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    values = {}
    for path in sorted(folder.glob("*.safetensors")):
        values |= load_file(path)
    return values


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> CampaignStore:
    """Begun twice at once, from a configuration; the tokenizer is made of the text."""
    folder = tmp_path_factory.mktemp("drawn") / "größe, a b"
    store = store_of(folder, [*TINY, *MODEL, "data.files=[json/*]"])
    with ThreadPoolExecutor() as pool:
        list(pool.map(make_first_model, [store, store]))
    return store


def test_the_model_of_round_0_is_copied_without_data_or_a_run(
    drawn: CampaignStore, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(drawn.model(0) / "export", source)
    store = store_of(tmp_path, [*TINY, "model=from_path", f"model.source={source}", NO_TEXT])
    make_first_model(store)
    assert store.model_manifest(0)["round"] == 0
    assert store.model_manifest(0)["digest"] == drawn.model_manifest(0)["digest"]
    for name in ("tokenizer.json", "config.json"):
        assert (store.model(0) / "export" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in store.folder.iterdir()) == ["round-000"]


def test_models_of_a_campaign_that_learns_answers_say_where_one_ends(
    drawn: CampaignStore, tmp_path: Path
) -> None:
    """Its `start` reads no conversations: the facilities do."""
    source = tmp_path / "source"
    shutil.copytree(drawn.model(0) / "export", source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATES["chatml"]
    tokenizer.save_pretrained(source)
    start = [*TINY, "model=from_path", f"model.source={source}", NO_TEXT]
    start.append("++model.config.vocab_size=302")
    for name, data in (("chat", ["data=chat_files", "data.files=talks.jsonl"]), ("text", [])):
        values = settings(tmp_path, start=start)
        values["sites"] = [site | {"overrides": data} for site in values["sites"]]
        store = CampaignStore(checked_campaign(values), tmp_path / "campaigns" / name)
        make_first_model(store)
        assert store.model_manifest(0).get("answers", False) is (name == "chat")
        file = store.model(0) / "export" / "generation_config.json"
        assert file.exists() is (name == "chat")


def test_half_precision_and_older_names_become_a_masters(
    drawn: CampaignStore, tmp_path: Path
) -> None:
    source, export = tmp_path / "source", drawn.model(0) / "export"
    shutil.copytree(export, source, ignore=shutil.ignore_patterns("*.safetensors*"))
    halves = {n.removeprefix("model."): t.bfloat16() for n, t in tensors(export).items()}
    save_file(halves, source / "model.safetensors")
    store = store_of(tmp_path, [*TINY, "model=from_path", f"model.source={source}", NO_TEXT])
    make_first_model(store)
    master = tensors(store.model(0) / "master")
    assert all(tensor.dtype == torch.float32 for tensor in master.values())
    for name, tensor in tensors(export).items():
        assert torch.equal(master[name], tensor.bfloat16().float()), name


def test_what_is_drawn_is_what_a_run_would_begin_with(drawn: CampaignStore) -> None:
    """A run of no steps exports the same bytes; and one tensor is there under both its names."""
    run = drawn.folder / "runs" / "same"
    words = [*drawn.campaign.start, "name=same", "training.steps=0", "evaluation.max_samples=1"]
    words += ["export.untrained=true", "export.dtype=float32"]
    words += [path_word("folders.runs", run.parent), path_word("folders.prepared", drawn.folder)]
    done = subprocess.run(
        [sys.executable, "-m", "atoll", "submit", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected, master = tensors(run / "export"), drawn.model(0) / "master"
    assert expected.keys() == tensors(master).keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(master).items())
    of_model = [p for p in (run / "export").glob("*.json") if p.name not in OWN]
    assert len(of_model) >= 3  # but for what each export says of its own making
    for path in of_model:
        made = json.loads((drawn.model(0) / "export" / path.name).read_text())
        assert made == json.loads(path.read_text()), path.name
    for path in master.iterdir():
        assert path.samefile(drawn.model(0) / "export" / path.name)


def test_a_mistake_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    store = store_of(tmp_path, [*TINY, "model=from_path", f"model.source={tmp_path / 'empty'}"])
    with pytest.raises(UserError, match="the first model ended with exit code 2"):
        make_first_model(store)
    assert not store.has_model(0) and not list(store.round(0).glob("*.partial*"))


MEMORY = """
import resource, sys
from pathlib import Path
from atoll.train import untrained
import transformers.models.llama.modeling_llama
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
untrained.main(sys.argv[1:])
print(peak() - before)
"""


def test_memory_is_that_of_a_file_and_a_block_not_of_the_model(
    drawn: CampaignStore, tmp_path: Path
) -> None:
    """A model of 180 MB in files of at most 32."""
    tokenizer = drawn.model(0) / "export"
    own = ["hidden_size=512", "intermediate_size=1408", "num_hidden_layers=14"]
    start = [*TINY, *MODEL, *(f"model.config.{word}" for word in own), NO_TEXT]
    start += [
        path_word("tokenizer.path", tokenizer),
        "export.max_file_gib=0.03",
        "export.dtype=float32",
    ]
    words = [*start, "name=x", f"folders.runs={tmp_path}"]
    compose = [sys.executable, "-m", "atoll", "compose", *words]
    text = subprocess.run(compose, capture_output=True, text=True, check=True).stdout
    (tmp_path / "run.yaml").write_text(text)
    argv = [sys.executable, "-c", MEMORY, str(tmp_path / "run.yaml"), str(tmp_path / "model")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    size_mib = index["metadata"]["total_size"] / 2**20
    assert size_mib > 160
    assert float(done.stdout.splitlines()[-1]) < size_mib / 2
