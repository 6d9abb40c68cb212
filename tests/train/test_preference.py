"""Pairs of answers: DPO and SimPO are what plain transformers compute, on any number of ranks."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_run
import torch
import torch.nn.functional as F
from chat_templates import SPECIAL, TALK, TEMPLATES, turn
from rank_pool import RankPool
from test_chat_run import SIZES, talk
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atoll import run_dir
from atoll.data import shards
from atoll.data.samples import open_samples
from atoll.data.sources.conversations import pair_of
from atoll.data.tokenize import prepare
from atoll.errors import UserError
from atoll.models.loss import chunked_log_probabilities
from atoll.settings import Run
from atoll.sharding.process_group import World
from atoll.train import generate, reference
from atoll.train.assemble import assemble
from atoll.train.reference import set_reference

PAIRS = 40
BETA = 0.5


def pair(number: int) -> dict[str, Any]:
    """A prompt, and two answers of other lengths."""
    return {
        "prompt": talk(number)[:1],
        "chosen": [turn("assistant", talk(number)[1]["content"])],
        "rejected": [turn("assistant", talk(number + 500)[1]["content"] + " reef")],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("pairs")
    rows = [pair(number) for number in range(PAIRS)]
    (path / "text.txt").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "pairs.jsonl").write_bytes((path / "text.txt").read_bytes())
    torch.manual_seed(3)
    config = AutoConfig.for_model(**SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(path / "base")
    return path


def pair_run(folder: Path, ranks: int, task: dict[str, Any] | None = None, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "model": {"name": "llama", "source": str(folder / "base")},
        "tokenizer": {
            "path": str(tokenizer(folder)),
            "vocabulary_tokens": 300,
            "chat_template": TEMPLATES["phi4"],
        },
        "data": {
            "name": "pairs",
            "source": "files",
            "files": [str(folder / "pairs.jsonl")],
            "format": "preference",
            "validation": {"fraction": 0.2},
            "sequence_tokens": 96,
            "workers": 1,
        },
        "task": {"name": "preference", "beta": BETA} | (task or {}),
        "training": {
            "steps": 5,
            "global_batch_samples": 4,
            "microbatch_samples": 2,
            "log_every_steps": 1,
        },
        "export": {"dtype": "float32"},
    }
    return small_run.settings(folder, ranks, **values | changes)


def tokenizer(folder: Path) -> Path:
    """Made of the words once, with the tokens of the template."""
    path = folder / "tokenizer"
    if not path.exists():
        from atoll.data import vocabulary

        made = vocabulary.trained([" ".join(small_run.WORDS)] * 3, 290)
        vocabulary.add_tokens(made, [*SPECIAL[:3]], TEMPLATES["phi4"])
        made.save_pretrained(str(path))
    return path


def trained(ranks: RankPool, run: Run) -> Path:
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=run.world_size)
    return run_folder


@pytest.fixture(scope="module")
def whole(ranks: RankPool, folder: Path) -> Path:
    return trained(ranks, pair_run(folder, 2, name="whole"))


def answers_logp(model: Any, folder: Path, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By transformers alone: the log-probability of each answer, and its tokens."""
    reads = AutoTokenizer.from_pretrained(tokenizer(folder))
    reads.chat_template = TEMPLATES["phi4"]
    sums, counts = [], []
    for answer in ("chosen", "rejected"):
        row = pair(number)
        words: dict[str, Any] = {"return_dict": False}
        prompt = reads.apply_chat_template(row["prompt"], add_generation_prompt=True, **words)
        ids = torch.tensor([reads.apply_chat_template(row["prompt"] + row[answer], **words)])
        assert ids[0, : len(prompt)].tolist() == prompt
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        each = logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        sums.append(each.sum())
        counts.append(len(each))
    return torch.stack(sums), torch.tensor(counts)


def plain_figures(folder: Path, export: Path, numbers: list[int], loss: str) -> tuple[float, ...]:
    """Mean loss, accuracy and margin."""
    model, base = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (export, folder / "base")
    )
    losses, leads = [], []
    with torch.no_grad():
        for number in numbers:
            logp, tokens = answers_logp(model, folder, number)
            if loss == "simpo":
                rewards, margin = BETA * logp / tokens, 0.25
            else:
                rewards, margin = BETA * (logp - answers_logp(base, folder, number)[0]), 0.0
            leads.append(float(rewards[0] - rewards[1]))
            losses.append(float(-F.logsigmoid(rewards[0] - rewards[1] - margin)))
    lead = float(np.mean(np.array(leads) > 0))
    return float(np.mean(losses)), lead, float(np.mean(leads))


def held_out(run: Run) -> list[int]:
    from atoll.data.text_folder import split_corpora

    return [int(n) for n in split_corpora(run)[0].held_out(0, PAIRS).nonzero()[0]]


def test_dpo_begins_at_log_2_and_ends_as_transformers_says(whole: Path, folder: Path) -> None:
    before, after = small_run.records(whole, "evaluation")
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    numbers = held_out(pair_run(folder, 2))
    loss, accuracy, margin = plain_figures(folder, run_dir.export(whole), numbers, "dpo")
    assert after["targets"] == len(numbers)
    assert after["loss"] == pytest.approx(loss, abs=1e-5)
    assert after["accuracy"] == pytest.approx(accuracy)
    assert after["margin"] == pytest.approx(margin, abs=1e-5)
    assert after["margin"] > 0.01, "the chosen answers have come to lead"


@pytest.mark.parametrize("sharding", ["ddp", "single"])
def test_every_sharding_has_the_same_losses(
    ranks: RankPool, whole: Path, folder: Path, sharding: str
) -> None:
    count = 1 if sharding == "single" else 2
    run = pair_run(folder, count, name=sharding, sharding=small_run.sharding(sharding))
    assert small_run.losses(trained(ranks, run)) == pytest.approx(small_run.losses(whole), abs=1e-5)


def test_half_precision_leaves_the_reference_as_it_is(ranks: RankPool, folder: Path) -> None:
    """Answers have log-probabilities of hundreds: in bf16 they would be whole numbers."""
    first = {}
    for sharding in ("full_shard", "ddp"):
        changes = {"precision__compute": "bf16", "training__steps": 1}
        run = pair_run(
            folder, 2, name=f"half-{sharding}", sharding=small_run.sharding(sharding), **changes
        )
        first[sharding] = small_run.losses(trained(ranks, run))[1]
    assert first["full_shard"] == pytest.approx(math.log(2), abs=1e-3)
    assert first["full_shard"] == pytest.approx(first["ddp"], abs=1e-3)


def whole_parameters(world: World, run: Run) -> list[str]:
    """Those that are no rank's own part, behind the passes that make the reference."""
    train_state = assemble(run, run_dir.folder(run), world)
    set_reference(train_state)
    named = train_state.model.named_parameters()
    return [name for name, parameter in named if not isinstance(parameter, DTensor)]


def test_the_reference_leaves_each_rank_its_own_part(ranks: RankPool, folder: Path) -> None:
    run = pair_run(folder, 2, name="sharded", sharding=small_run.sharding("full_shard"))
    small_run.ready(run)
    assert ranks.run(whole_parameters, run, world=2) == [[], []]


def references(world: World, run: Run) -> list[float]:
    """Of the training pairs, as a run without a checkpoint gets them."""
    train_state = assemble(run, run_dir.folder(run), world)
    set_reference(train_state)
    assert train_state.training.reference is not None
    return [float(x) for x in train_state.training.reference.ravel()]


def test_the_reference_is_of_the_pairs_and_the_weights_that_are_there(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    """A run that died before its first checkpoint begins again, and its files may be others now."""
    pairs, base = tmp_path / "pairs.jsonl", tmp_path / "base"
    rows = (folder / "pairs.jsonl").read_text().splitlines()
    pairs.write_text("\n".join(rows) + "\n")
    shutil.copytree(folder / "base", base)
    changes = {"data__files": [str(pairs)], "model__source": str(base), "name": "again"}
    changes["folders"] = {name: str(tmp_path / name) for name in ("runs", "prepared")}
    run = pair_run(folder, 1, **changes)
    small_run.ready(run)
    [before] = ranks.run(references, run, world=1)
    assert ranks.run(references, run, world=1) == [before]
    pairs.write_text("\n".join(reversed(rows)) + "\n")
    small_run.ready(run)
    [turned] = ranks.run(references, run, world=1)
    assert turned != before
    run_dir.reference_file(run_dir.folder(run)).unlink()
    assert ranks.run(references, run, world=1) == [turned]
    torch.manual_seed(4)
    config = AutoConfig.for_model(**SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    assert ranks.run(references, run, world=1) != [turned]


def references_of_large_files(world: World, run: Run) -> list[float]:
    """Of files whose first MiB is of weights that adapters do not change."""
    same = SimpleNamespace(hexdigest=lambda: "the embedding")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "hashlib", SimpleNamespace(sha256=lambda _: same))
        return references(world, run)


def test_the_reference_is_not_of_a_model_that_was_trained_on_since(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder / "base", base)
    changes = {"model__source": str(base), "name": "since"}
    changes["folders"] = {name: str(tmp_path / name) for name in ("runs", "prepared")}
    run = pair_run(folder, 1, **changes)
    small_run.ready(run)
    before = ranks.run(references_of_large_files, run, world=1)
    assert ranks.run(references_of_large_files, run, world=1) == before
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(1.5)
    model.save_pretrained(base)
    assert ranks.run(references_of_large_files, run, world=1) != before


def test_simpo_needs_no_reference(ranks: RankPool, folder: Path) -> None:
    run = pair_run(folder, 1, {"loss": "simpo", "margin": 0.25}, name="simpo")
    run_folder = trained(ranks, run)
    assert not run_dir.reference_file(run_folder).exists()
    after = small_run.records(run_folder, "evaluation")[-1]
    loss, accuracy, _ = plain_figures(folder, run_dir.export(run_folder), held_out(run), "simpo")
    assert after["loss"] == pytest.approx(loss, abs=1e-5) and after["accuracy"] == pytest.approx(
        accuracy
    )


def test_adapters_learn_beside_the_reference(ranks: RankPool, folder: Path) -> None:
    model = {"name": "llama", "source": str(folder / "base"), "lora": {"rank": 4}}
    run = pair_run(folder, 1, name="lora", model=model, sharding=small_run.sharding("ddp"))
    before, after = small_run.records(trained(ranks, run), "evaluation")
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6) and after["margin"] > 0


def test_the_export_answers(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(whole), "--prompt", "the reef"]) == 0
    assert capsys.readouterr().out.startswith("user: the reef\nassistant: ")


def test_pairs_that_are_too_long_are_left_out_whole(tmp_path: Path, folder: Path) -> None:
    run = pair_run(folder, 1, name="short")
    data = run.data.model_copy(update={"sequence_tokens": 64})
    run = run.model_copy(update={"data": data})
    lines: list[str] = []
    prepared = prepare(run, lines.append)
    manifest = shards.read_manifest(prepared)
    assert manifest.dropped("train") and manifest.documents("train") % 2 == 0
    assert any(f"of {PAIRS} pairs 0 are cut" in line for line in lines), lines
    batch = (samples := open_samples(run.data, prepared, "train")).batch(np.arange(1))
    assert samples.targets(np.arange(len(samples))).tolist() == [1] * len(samples)
    assert (batch.positions_BT == 0).sum() >= 2


def test_pairs_may_be_texts_or_whole_conversations() -> None:
    both = pair_of("row 1", {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"})
    assert [[m["content"] for m in talk.messages] for talk in both] == [
        ["2 + 3?", "5"],
        ["2 + 3?", "6"],
    ]
    better, worse = pair_of("row 1", {"chosen": TALK, "rejected": TALK[:2]})
    assert (better.messages, worse.messages) == (TALK, TALK[:2])


@pytest.mark.parametrize("prompt", ["2 + 3?", [{"from": "human", "value": "2 + 3?"}]])
@pytest.mark.parametrize("before", [[], [turn("system", "Count.")]])
def test_whole_conversations_beside_their_prompt_have_it_once(
    prompt: Any, before: list[dict[str, Any]]
) -> None:
    sides = {
        name: [*before, turn("user", "2 + 3?"), turn("assistant", answer)]
        for name, answer in (("chosen", "5"), ("rejected", "6"))
    }
    better, worse = pair_of("row 1", {"prompt": prompt} | sides)
    assert (better.messages, worse.messages) == (sides["chosen"], sides["rejected"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 4: no 'rejected' in the fields: prompt, chosen"),
        ({"chosen": TALK, "rejected": TALK[:1]}, "row 4: no assistant turn"),
        ({"prompt": "a", "chosen": "b", "rejected": 6}, "row 4: the content of turn 2 is no text"),
    ],
)
def test_a_bad_pair_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pair_of("row 4", fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"task": {"name": "causal_lm"}},
            "task=causal_lm, but data=pairs has data.format=preference",
        ),
        ({"sharding": small_run.sharding("tensor")}, "task=preference with sharding.tensor=2"),
        ({"sharding": small_run.sharding("deepspeed_zero2")}, "DeepSpeed's engine gives no"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        pair_run(folder, 2, **changes)


@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_log_probabilities_are_torch_s(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(37, 6, requires_grad=True)
    weight = torch.randn(50, 6, requires_grad=True)
    labels = torch.randint(0, 50, (37,))
    labels[::5] = -100
    logp = chunked_log_probabilities(hidden, weight, None, labels, chunk)
    expected = -F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    torch.testing.assert_close(logp, expected)
    ours, theirs = (
        torch.autograd.grad(
            (x * torch.linspace(0, 1, 37)).sum(), [hidden, weight], retain_graph=True
        )
        for x in (logp, expected)
    )
    torch.testing.assert_close(ours, theirs)


def test_a_replayed_step_and_a_resumed_run_have_the_same_reference(
    ranks: RankPool, whole: Path, folder: Path
) -> None:
    """Also where its file is gone: what a run began with is known before it resumes."""
    changes: dict[str, Any] = {"checkpoint": {"every_steps": 2}, "guard": {"replay_every_steps": 2}}
    run = pair_run(folder, 2, name="resumed", **changes)
    run_folder = trained(ranks, run)
    assert small_run.losses(run_folder) == pytest.approx(small_run.losses(whole), abs=1e-6)
    stored = np.load(run_dir.reference_file(run_folder))
    run_dir.reference_file(run_folder).unlink()
    run_dir.result_file(run_folder).unlink()
    shutil.rmtree(run_dir.checkpoint(run_folder, 5))
    ranks.run(small_run.train_here, run, world=2)
    again = np.load(run_dir.reference_file(run_folder))
    np.testing.assert_array_equal(again["train"], stored["train"])
    assert small_run.losses(run_folder) == pytest.approx(small_run.losses(whole), abs=1e-6)
