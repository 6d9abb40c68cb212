"""Campaigns of adapters: what travels, what the mean of them is, and whose base is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import defaults
import pytest
import torch
import yaml
from made_up import about
from safetensors.torch import load_file
from test_federate import MODEL, TINY, finished, settings
from torch import Tensor

from atoll import run_dir
from atoll.__main__ import main
from atoll.campaign import first_model, site_models
from atoll.campaign.asked import request, training_words
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.config.compose import compose, path_word
from atoll.errors import UserError
from atoll.federation.aggregate import aggregate, verified
from atoll.federation.apply_delta import apply_delta
from atoll.federation.error_feedback import encoded_layout
from atoll.federation.global_model import first_global, read_global
from atoll.federation.make_delta import make_delta
from atoll.models.adapter import FILE, adapt, is_adapters, merging_reader, name_in_file
from atoll.models.build import build_config, build_model
from atoll.models.safetensor_files import write_tensors
from atoll.models.weights import Slices
from atoll.settings import Lora, Model, Training, dumped, load_run
from atoll.settings.federation import Rule

# of every run: a base that is drawn from the seed is at each facility without being sent
BASE = [word for word in MODEL if not word.startswith("tokenizer.")]
LORA = {"rank": 4, "alpha": 8.0}
LAYER, ROWS, COLUMNS, RANK = "model.layers.0.mlp.up_proj", 12, 10, 3
LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip


def bytes_of(tensors: dict[str, Any], codec: str) -> int:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    files = encoded_layout({"model.safetensors": shapes}, codec).values()
    parts = [part for file in files for part in file.values()]
    return sum(shape[0] * dtype.itemsize for dtype, shape in parts)


def test_adapters_of_7b_are_over_100_times_fewer_bytes() -> None:
    """By the shapes of the real model, in every encoding both ways."""
    model = Model(name="x", config=LLAMA_7B, lora=Lora(rank=16))
    training = Training(**defaults.group("training", global_batch_samples=1))
    hf = build_model(build_config(model, 32000, 512, {}), training).hf
    dense = dict(hf.named_parameters())
    assert sum(tensor.numel() for tensor in dense.values()) == 6_738_415_616
    adapt(hf, model)
    sent = {name_in_file(n): p for n, p in hf.named_parameters() if is_adapters(n, None)}
    for codec in ("fp32", "bf16", "int8", "int4", "sparse"):
        assert bytes_of(dense, codec) > 100 * bytes_of(sent, codec)


def adapter(seed: int, a: Tensor | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {
        "A": torch.randn(RANK, COLUMNS, generator=generator) * 0.1 if a is None else a,
        "B": torch.randn(ROWS, RANK, generator=generator) * 0.1,
    }
    return {f"base_model.model.{LAYER}.lora_{x}.weight": value for x, value in values.items()}


def written(folder: Path, tensors: dict[str, Tensor], freeze_a: bool) -> Path:
    folder.mkdir()
    stays = [name for name in tensors if freeze_a and ".lora_A." in name]
    write_tensors(folder / FILE, tensors, stays)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def dense(folder: Path, base: Tensor) -> Tensor:
    """What an adapter's folder makes of a weight, as the campaign's last model is made."""
    hf: Any = SimpleNamespace(get_submodule=lambda _: None)

    def read(name: str, slices: Slices) -> Tensor:
        return base

    lora = Lora(rank=RANK, alpha=2.0 * RANK)
    return merging_reader(read, hf, lora, folder)(f"{LAYER}.weight", (slice(0), slice(0)))


@pytest.mark.parametrize("shares_a", [True, False])
def test_the_mean_of_adapters(tmp_path: Path, shares_a: bool) -> None:
    """Of each tensor the dense mean; of the model too, exactly where A is the same for all."""
    start = adapter(0)
    first_global(written(tmp_path / "start", start, shares_a), tmp_path / "global-0", {})
    a = next(tensor for name, tensor in start.items() if "lora_A" in name)
    given = {name: adapter(n + 1, a if shares_a else None) for n, name in enumerate(("x", "y"))}
    updates = []
    for n, (facility, tensors) in enumerate(given.items()):
        words = about(facility, tokens=1000 * (n + 1))
        trained, out = (
            written(tmp_path / facility, tensors, shares_a),
            tmp_path / f"update-{facility}",
        )
        make_delta(
            tmp_path / "global-0", trained, None, "fp32", out, tmp_path / f"r-{facility}", words
        )
        updates.append(verified(out, [read_global(tmp_path / "global-0")["digest"]]))
    rule = Rule(weigh="tokens", max_norm_ratio=1e9, min_cosine=-1.0, dtype="float32")
    next_model = tmp_path / "global-1"
    aggregate(tmp_path / "global-0", updates, rule, "fp32", next_model, {"round": 1})
    result, exported = (load_file(next_model / part / FILE) for part in ("master", "export"))
    for folder in (next_model / "delta", *(update.folder for update in updates)):
        sent = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
        assert any("lora_A" in name for name in sent) != shares_a
        assert any("lora_B" in name for name in sent)
    assert result.keys() == exported.keys() == start.keys()
    applied = tmp_path / "applied"
    apply_delta(tmp_path / "global-0", next_model / "delta", "fp32", applied)
    assert read_global(applied)["digest"] == read_global(next_model)["digest"]
    for name, tensor in result.items():
        wanted = (given["x"][name] + 2 * given["y"][name]) / 3
        torch.testing.assert_close(tensor, wanted, atol=1e-7, rtol=0)
    base = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(9))
    reference = (dense(tmp_path / "x", base) + 2 * dense(tmp_path / "y", base)) / 3
    merged = dense(next_model / "master", base)
    is_same = torch.allclose(merged, reference, atol=1e-6, rtol=0)
    assert is_same == shares_a and not torch.allclose(merged, base, atol=1e-3)


@pytest.mark.parametrize(
    ("lengths", "left_out"),
    [((1.0, 1e6), ["f1"]), ((1.0, 1e-9, 1e-9), []), ((1.0, 0.0, 1e-8), []), ((1.0, 0.9), [])],
)
def test_where_only_b_learns_lengths_are_judged_beside_a(
    tmp_path: Path, lengths: tuple[float, ...], left_out: list[str]
) -> None:
    """B begins as zero: it says nothing of how long an update may be."""
    start, honest = adapter(0), adapter(1)
    start = {n: x if ".lora_A." in n else 0 * x for n, x in start.items()}
    base = tmp_path / "global-0"
    first_global(written(tmp_path / "start", start, freeze_a=True), base, {})
    updates = []
    for n, length in enumerate(lengths):
        tensors = {m: x if ".lora_A." in m else length * honest[m] for m, x in start.items()}
        trained, out = written(tmp_path / f"t{n}", tensors, freeze_a=True), tmp_path / f"u{n}"
        make_delta(base, trained, None, "fp32", out, tmp_path / f"r{n}", about(f"f{n}"))
        updates.append(verified(out, [read_global(base)["digest"]]))
    outcome = aggregate(base, updates, Rule(), "fp32", tmp_path / "global-1", {"round": 1})
    assert list(outcome.rejected) == left_out


def campaign_of(folder: Path, **changes: Any) -> CampaignStore:
    train = {"train": [*TINY, *BASE, "optimizer.learning_rate=1e-2"], "lora": LORA}
    values = settings(folder, **(train | changes))
    return CampaignStore(checked_campaign(values), folder / "campaigns" / "c")


def test_a_base_that_is_a_link_is_named_where_it_leads(tmp_path: Path) -> None:
    """A snapshot of a cache: its files are links, by names that only lead on from there."""
    snapshot = tmp_path / "models--x" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "base").symlink_to(snapshot)
    words = site_models.model_words(tmp_path / "site", {"frozen": "f", "overrides": []}, tmp_path)
    assert path_word("model.source", snapshot) in words


def test_an_image_has_every_round_where_adapters_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = campaign_of(tmp_path)
    start = ["facility=generic_slurm", "image=cuda", f"image.file={tmp_path}/x.sif"]
    campaign = store.campaign.model_copy(update={"start": [*store.campaign.start, *start]})
    store = CampaignStore(campaign, store.folder)
    store.round(0).mkdir(parents=True, exist_ok=True)
    store.model(0).mkdir(exist_ok=True)
    (store.model(0) / "manifest.json").write_text(json.dumps({"frozen": "f" * 64, "digest": "0"}))
    ran: list[list[str]] = []

    def noted(argv: list[str], what: str) -> str:
        ran.append(argv)
        return json.dumps({"digest": "f" * 64})

    monkeypatch.setattr(first_model, "run_atoll", noted)
    monkeypatch.setattr(first_model, "_shown", noted)
    first_model.merge_adapter(store, store.model(1) / "master", store.folder / "merged")
    assert len(ran) == 2 and all(str(store.folder) in argv for argv in ran)


def test_a_facility_with_another_base_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once; when a file of it changes, it is read again."""
    store, base = campaign_of(tmp_path), tmp_path / "site" / "base"
    [site, _] = store.campaign.sites
    asked = {"overrides": training_words(store.campaign, 1, site, 3, 0), "frozen": "f" * 64}
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(LLAMA_7B))
    digests = ["0" * 64, "f" * 64]
    monkeypatch.setattr(
        site_models, "run_atoll", lambda *_: f"a greeting\n{json.dumps({'digest': digests.pop(0)})}"
    )
    lines = [
        *asked["overrides"],
        *site_models.model_words(base.parent, asked, tmp_path / "b" / "export"),
    ]
    lines.append("name=x")
    lora = compose(lines).run.model.lora
    assert lora is not None and (lora.rank, lora.start) == (4, tmp_path / "b" / "export")
    bundle = tmp_path / "größe, b" / "model"
    bundle.mkdir(parents=True)
    named = asked | {"overrides": [path_word("folders.bundle", bundle.parent)]}
    assert path_word("model.source", bundle) in site_models.model_words(tmp_path, named, tmp_path)
    assert path_word("model.source", base) in site_models.model_words(base.parent, named, tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=r"here is 000000000000, the campaign's is ffffffff"):
            site_models.refuse_other_frozen(base.parent, asked, lines)
    (base / "config.json").write_text(json.dumps(LLAMA_7B, indent=1))
    site_models.refuse_other_frozen(base.parent, asked, lines)
    site_models.refuse_other_frozen(base.parent, asked, lines)
    assert not digests


def test_a_branch_of_the_hub_that_moved_is_another_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = campaign_of(tmp_path)
    [site, _] = store.campaign.sites
    lines = [*training_words(store.campaign, 1, site, 3, 0), "model=from_path", "name=x"]
    lines += ["model.source=org/base"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(site_models, "atoll_outside_jobs", lambda _: ["atoll"])
    branch = tmp_path / "hub" / "models--org--base" / "refs" / "main"
    branch.parent.mkdir(parents=True)
    digests = ["f" * 64, "0" * 64]
    monkeypatch.setattr(site_models, "run_atoll", lambda *_: json.dumps({"digest": digests.pop(0)}))
    asked = {"overrides": lines, "frozen": "f" * 64}
    branch.write_text("a" * 40)
    for _ in range(2):
        site_models.refuse_other_frozen(tmp_path, asked, lines)
    branch.write_text("b" * 40)
    with pytest.raises(UserError, match="here is 000000000000"):
        site_models.refuse_other_frozen(tmp_path, asked, lines)


@pytest.mark.full
@pytest.mark.login_node
def test_a_campaign_of_adapters_ends_with_the_base_and_their_mean(tmp_path: Path) -> None:
    """What is sent are adapters; a facility with another base is named, and not waited for."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    words = [word for word in BASE if "hidden_size" not in word]
    train = {"train": [*TINY, "optimizer.learning_rate=1e-2"], "lora": LORA, "attempts": 1}
    sites = settings(tmp_path)["sites"]
    for site, model in zip(sites, (BASE, [*words, "model.config.hidden_size=64"]), strict=True):
        site["overrides"] += model
    rule = {"max_norm_ratio": 100, "dtype": "float32"}
    output = finished(tmp_path, **train, sites=sites, rule=rule, last_loss=True)
    assert "without lagoon: lagoon: the base llama_tiny here is " in output
    assert "the model of round 2: loss " in output
    store = load_store(tmp_path / "campaigns" / "c")
    merged, run = store.export(2), store.round(0) / "run.yaml"
    adapters = sum(p.stat().st_size for p in (store.model(0) / "master").iterdir())
    received = store.journal(1).records("received")[0]["bytes"]
    assert received < adapters < (merged / "model.safetensors").stat().st_size / 3
    assert request(store, 2, store.campaign.sites[0])["frozen"]
    assert main(["untrained", str(run), str(tmp_path / "base")]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        before = base(tokens).logits
        beside = PeftModel.from_pretrained(base, str(store.model(2) / "export")).eval()
        wanted = beside(tokens).logits
        logits = AutoModelForCausalLM.from_pretrained(merged).eval()(tokens).logits
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(logits, before, atol=1e-3)
    assert main(["verify", str(merged)]) == 0
    written_twice = sorted(path.name for path in merged.glob("*.safetensors"))
    assert written_twice == ["model.safetensors"], "merged once, and no adapter is left beside it"


def test_adapters_beside_scaled_positions_travel(tmp_path: Path) -> None:
    """The coordinator merges them, with the positions that `start` says."""
    words = ["facility=laptop", "name=x", "export.merged=false", "model.lora.rank=8"]
    words += ["model.rope_scaling.kind=yarn", "model.rope_scaling.factor=2"]
    with pytest.raises(UserError, match=r"export\.merged=false with model\.rope_scaling"):
        compose(words)
    run = compose([*words, path_word("model.lora.start", tmp_path)]).run
    run_dir.write_whole(tmp_path / "run.yaml", yaml.safe_dump(dumped(run)))
    assert load_run(tmp_path / "run.yaml") == run
