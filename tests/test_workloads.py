"""The known jobs at their smoke size, through the command line; bundles; evaluation alone."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from atoll import run_dir

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n"


def atoll(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "atoll", *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = run_dir.metrics_file(folder).read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == event]


@pytest.fixture(scope="module", autouse=True)
def same_products() -> Iterator[None]:
    """MKL rounds by alignment and threads otherwise, and AdamW's first steps make that larger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKL_CBWR", "COMPATIBLE")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workloads")
    (folder / "play.txt").write_text(PLAY * 200)
    talks = [
        [
            {"role": "user", "content": f"What is {n} and {n}?"},
            {"role": "assistant", "content": f"It is {n + n}."},
        ]
        for n in range(200)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    for name, count in (("train", 48), ("held_out", 21)):
        rows = [
            {"sentence1": f"a reef of {n} corals", "sentence2": f"{n + n % 2}", "label": n % 2}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ROWS = ["data.source=files", "data.hub=null", "data.validation.split=null"]
ROWS += ["data.files=[train.jsonl]", "data.validation.files=[held_out.jsonl]"]
JOBS = {
    "llama2_7b_it": [],
    "llama2_7b_cs": [],
    "opt_125m_yelp": [],
    "gpt_shakespeare_char": ["data.files=[play.txt]"],
    "bert_rte": ROWS,
    "llama_qlora": [],
    "chat_sft": ["data.files=[talks.jsonl]"],
}


SHAKESPEARE = "gpt_shakespeare_char"
Job = Callable[[str], Path]


@pytest.fixture(scope="module")
def job(home: Path) -> Job:
    """Runs a job the first time that it is asked for; the folder of its run."""

    def folder_of(name: str) -> Path:
        folder = home / "runs" / name
        if not folder.exists():
            line = ["facility=laptop", "ranks_per_node=2", f"experiment={name}_smoke"]
            atoll(home, "submit", *line, f"name={name}", *JOBS[name])
        return folder

    return folder_of


FULL = [pytest.param(name, marks=pytest.mark.full) for name in JOBS if name != SHAKESPEARE]


@pytest.mark.parametrize("name", [SHAKESPEARE, *FULL])
def test_smoke_size(job: Job, name: str) -> None:
    folder = job(name)
    before, *_, after = records(folder, "evaluation")
    assert after["loss"] < before["loss"]
    assert run_dir.export(folder).is_dir()
    assert run_dir.sample_file(folder).is_file() == (name != "bert_rte")
    if name == "opt_125m_yelp":
        assert len(records(folder, "evaluation")) == 4, "before, and after each of three epochs"
    if name == "chat_sft":
        assert run_dir.sample_file(folder).read_text().startswith("user: Who are you?\nassistant: ")
    if name == "llama_qlora":
        assert (run_dir.export(folder) / "adapter" / "adapter_config.json").is_file()


@pytest.mark.full
def test_4_bit_weights_go_with_full_shard(home: Path, job: Job) -> None:
    line = ["facility=laptop", "ranks_per_node=2", "experiment=llama_qlora_smoke"]
    atoll(home, "submit", *line, "sharding=full_shard", "name=qlora_sharded")
    sharded, copied = home / "runs" / "qlora_sharded", job("llama_qlora")
    losses = [[r["loss"] for r in records(of, "train")] for of in (sharded, copied)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)  # both in bf16 where there is any
    assert (run_dir.export(sharded) / "adapter" / "adapter_model.safetensors").is_file()
    assert run_dir.sample_file(sharded).read_text()


@pytest.mark.full
def test_one_device_has_the_losses_of_two(home: Path, job: Job) -> None:
    line = ["facility=laptop", "ranks_per_node=1", "experiment=opt_125m_yelp_smoke", "name=one"]
    atoll(home, "submit", *line)
    two, one = (records(folder, "train") for folder in (job("opt_125m_yelp"), home / "runs/one"))
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], abs=1e-5)
    said = atoll(home, "report", "one", "opt_125m_yelp")
    assert said.count(f"  {one[-1]['loss']:.4f}  ") == 2 and "speed-up" in said, said


def test_evaluate_says_what_training_said(home: Path, job: Job) -> None:
    line = ["facility=laptop", "ranks_per_node=1", "sharding=single", "name=judged"]
    line += ["experiment=gpt_shakespeare_char_smoke", "data.files=[play.txt]", "model=from_path"]
    trained = job(SHAKESPEARE)
    line += [f"model.source={run_dir.export(trained)}", "precision=fp32", *NO_CONFIG]
    atoll(home, "evaluate", *line)
    [found] = records(home / "runs" / "judged", "evaluation")
    last = records(trained, "evaluation")[-1]
    assert found["perplexity"] == pytest.approx(last["perplexity"], rel=0.05)
    assert not run_dir.export(home / "runs" / "judged").exists()
    assert "judged: finished, 0 steps" in atoll(home, "status", "judged")


NO_CONFIG = ["~model.config"]


@pytest.fixture(scope="module")
def bundle(home: Path, tokenizer: None) -> Path:
    """Of a model in the old format, and its tokens."""
    import torch

    source = home / "old"
    config = AutoConfig.for_model(**(tiny.CONFIGS["llama"] | {"vocab_size": 300}))
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(source)
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    atoll(home, "prepare", "--into", "bundle", *LINE)
    return home / "bundle"


LINE = [
    "facility=laptop",
    "ranks_per_node=1",
    "sharding=single",
    "model=from_path",
    "model.source=old",
    "tokenizer.path=runs/words/export",
    "data=text_files",
    "data.files=[play.txt]",
    "data.document=paragraph",
    "data.sequence_tokens=32",
    "training.steps=2",
    "training.global_batch_samples=2",
    "precision=fp32",
]


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> None:
    """Of 300 tokens, made from the play."""
    line = ["facility=laptop", "ranks_per_node=1", "sharding=single", "model=llama_tiny"]
    line += ["data=text_files", "data.files=[play.txt]", "data.document=paragraph"]
    line += ["tokenizer.vocabulary_tokens=290", "model.config.vocab_size=300", "name=words"]
    line += ["training.steps=0", "export.untrained=true", "data.sequence_tokens=32"]
    atoll(home, "submit", *line)


def test_a_bundle_trains_where_nothing_else_is(home: Path, bundle: Path) -> None:
    assert not list((bundle / "model").glob("*.bin")), "converted"
    moved = home / "facility" / "bundle"
    moved.parent.mkdir()
    subprocess.run(["cp", "-r", str(bundle), str(moved)], check=True)
    (home / "old" / "config.json").rename(home / "old" / "away.json")
    words = [*LINE, f"folders.bundle={moved}", "name=offline"]
    atoll(home, "submit", *words)
    (home / "old" / "away.json").rename(home / "old" / "config.json")
    assert records(home / "runs" / "offline", "train")
    assert "files match" in atoll(home, "prepare", "--verify", str(moved))


def test_a_bundle_of_another_run_or_cut_short_is_refused(home: Path, bundle: Path) -> None:
    words = [*LINE, f"folders.bundle={bundle}", "name=refused"]
    said = atoll(home, "submit", *words, "data.document=line", code=2)
    assert "was made with data=" in said
    path = next((bundle / "model").glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert f"has {len(content) - 10:,} bytes, not" in atoll(home, "submit", *words, code=2)
    path.write_bytes(content[:-1] + b"x")
    assert "bundle.json says" in atoll(home, "prepare", "--verify", str(bundle), code=2)
    path.write_bytes(content)
    assert "begun with other settings" in atoll(
        home, "prepare", "--into", "bundle", *LINE, "training.steps=3", code=2
    )


def test_what_cannot_be_had_is_said(home: Path) -> None:
    line = ["facility=laptop", "ranks_per_node=1", "sharding=single", "model=opt_125m"]
    said = atoll(home, "prepare", "--into", "none", *line, code=2)
    assert "model 'facebook/opt-125m' is no folder here" in said
