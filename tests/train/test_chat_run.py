"""A whole run on conversations: its losses are plain transformers', its export chats."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import small_run
import tiny
import torch
from chat_templates import SPECIAL, TEMPLATES, turn
from rank_pool import RankPool
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atoll import run_dir
from atoll.settings import Run
from atoll.train import generate
from atoll.train.untrained import write_untrained

SIZES = tiny.CONFIGS["llama"] | {"vocab_size": 360, "max_position_embeddings": 96}
TEMPLATE = TEMPLATES["chatml"]
IM = SPECIAL[:2]


def talk(number: int) -> list[dict[str, Any]]:
    source = random.Random(number)
    words = [
        " ".join(source.choice(small_run.WORDS) for _ in range(source.randint(1, 6)))
        for _ in range(2 * source.randint(1, 3))
    ]
    return [turn(("user", "assistant")[n % 2], text) for n, text in enumerate(words)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("chat")
    rows = [{"messages": talk(number)} for number in range(60)]
    (path / "text.txt").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "talks.jsonl").write_bytes((path / "text.txt").read_bytes())
    config = AutoConfig.for_model(**SIZES)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(path / "base")
    return path


def chat_run(folder: Path, ranks: int, **changes: Any) -> Run:
    values: dict[str, Any] = {
        "model": {"name": "llama", "config": SIZES},
        "tokenizer": {
            "vocabulary_tokens": 300,
            "chat_template": TEMPLATE,
            "add_tokens": [*IM],
        },
        "data": {
            "name": "talks",
            "source": "files",
            "files": [str(folder / "talks.jsonl")],
            "format": "chat",
            "validation": {"fraction": 0.2},
            "sequence_tokens": 96,
            "workers": 1,
        },
        "training": {"steps": 6, "global_batch_samples": 4, "microbatch_samples": 2},
        "export": {"dtype": "float32"},
    }
    return small_run.settings(folder, ranks, **values | changes)


@pytest.fixture(scope="module")
def whole(ranks: RankPool, folder: Path) -> Path:
    run = chat_run(folder, 2, name="whole")
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=2)
    return run_folder


def held_out(run: Run) -> list[list[dict[str, Any]]]:
    """The held-out conversations: those that training has not."""
    from atoll.data.text_folder import split_corpora

    numbers = split_corpora(run)[0].held_out(0, 60).nonzero()[0]
    return [talk(int(number)) for number in numbers]


def plain_loss(export: Path, talks: list[list[dict[str, Any]]]) -> tuple[float, int]:
    """Transformers alone: each conversation by itself, loss where its mask is."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    total, count = 0.0, 0
    for messages in talks:
        tokens = tokenizer.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True
        )
        ids = torch.tensor([tokens["input_ids"]])
        labels = ids.masked_fill(torch.tensor([tokens["assistant_masks"]]) == 0, -100)
        targets = int((labels[:, 1:] >= 0).sum())
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * targets
        count += targets
    return total / count, count


def test_the_held_out_loss_is_transformers_own_on_answers(whole: Path, folder: Path) -> None:
    after = small_run.records(whole, "evaluation")[-1]
    loss, targets = plain_loss(run_dir.export(whole), held_out(chat_run(folder, 2)))
    assert after["targets"] == targets
    assert after["loss"] == pytest.approx(loss, abs=1e-5)
    assert after["loss"] < small_run.records(whole, "evaluation")[0]["loss"]


def test_packed_answers_learn_as_each_alone_does(
    ranks: RankPool, whole: Path, folder: Path
) -> None:
    run = chat_run(folder, 1, name="single", sharding=small_run.sharding("single"))
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    assert small_run.losses(run_folder) == pytest.approx(small_run.losses(whole), abs=1e-5)


def test_the_export_carries_the_template_and_where_to_stop(whole: Path) -> None:
    export = run_dir.export(whole)
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert (export / "chat_template.jinja").read_text() == TEMPLATE
    ends = json.loads((export / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends and tokenizer.eos_token_id in ends


def test_the_untrained_model_stops_where_the_trained_one_does(
    whole: Path, folder: Path, tmp_path: Path
) -> None:
    """A campaign's models have what its first one says of generation."""
    run = chat_run(folder, 2, name="whole")
    write_untrained(run, tmp_path / "first", run_dir.prepared(run) / "tokenizer")
    ends = [
        json.loads((export / "generation_config.json").read_text())["eos_token_id"]
        for export in (tmp_path / "first", run_dir.export(whole))
    ]
    assert ends[0] == ends[1] and len(ends[0]) == 2
    plain = run.model_copy(update={"data": run.data.model_copy(update={"format": "text"})})
    for name, answers in (("with", True), ("without", False)):
        tokenizer = run_dir.prepared(run) / "tokenizer"
        write_untrained(plain, tmp_path / name, tokenizer, answers=answers)
    said = json.loads((tmp_path / "with" / "generation_config.json").read_text())
    assert said["eos_token_id"] == ends[0]
    assert not (tmp_path / "without" / "generation_config.json").exists()


def test_a_prompt_goes_through_the_template(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = ["--prompt", "the reef", "--temperature", "0.01"]
    assert generate.main([str(whole), *cold]) == 0
    sample = run_dir.sample_file(whole).read_text()
    assert capsys.readouterr().out.strip() == sample.strip()
    assert sample.startswith("user: the reef\nassistant: ") and "<|im_start|>" not in sample
    # an export outside of its run is asked by a flag
    answers = []
    for words in ([str(whole)], [str(run_dir.export(whole)), "--chat"]):
        assert generate.main([*words, *cold, "--out", str(tmp_path / "out.jsonl")]) == 0
        answers.append(json.loads((tmp_path / "out.jsonl").read_text())["text"])
    assert answers[0] == answers[1] == sample.partition("assistant: ")[2].removesuffix("\n")


def test_an_answer_ends_where_those_learned_from_do(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    """The rows of added tokens learn too: without the end's, an answer runs on to the limit."""
    said = [("who are you", "a small reef"), ("and the tide", "it comes in")]
    talks = [[turn("user", question), turn("assistant", answer)] for question, answer in said]
    rows = [json.dumps({"messages": talk}) + "\n" for talk in talks * 40]
    (tmp_path / "talks.jsonl").write_text("".join(rows))
    like = chat_run(folder, 1)
    run = chat_run(
        folder,
        1,
        name="ends",
        sharding=small_run.sharding("single"),
        data=like.data.model_dump() | {"files": [str(tmp_path / "talks.jsonl")]},
        training={"steps": 40, "global_batch_samples": 4, "microbatch_samples": 2},
        optimizer=like.optimizer.model_dump() | {"learning_rate": 1e-2, "warmup_steps": 4},
    )
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    for question, answer in said:
        out = tmp_path / "out.jsonl"
        words = [str(run_folder), "--prompt", question, "--temperature", "0.01", "--out", str(out)]
        assert generate.main(words) == 0
        assert json.loads(out.read_text().splitlines()[-1])["text"] == answer
