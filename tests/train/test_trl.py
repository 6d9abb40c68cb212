"""The same conversations and pairs under TRL's trainers give the same losses, step by step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_run
from rank_pool import RankPool
from test_chat_run import chat_run, folder, talk
from test_preference import PAIRS, pair, pair_run
from test_preference import folder as pairs

from atoll import run_dir
from atoll.data.samples import open_samples
from atoll.settings import Run

__all__ = ["folder", "pairs"]

VERSION = "1.16.0"
STEPS = 4
SFT = """
import json, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

given = json.loads(sys.argv[1])
rows = Dataset.from_list([{"messages": talk} for talk in given["talks"]])
config = SFTConfig(
    output_dir=given["out"], max_steps=given["steps"], learning_rate=given["learning_rate"],
    per_device_train_batch_size=len(rows), lr_scheduler_type="constant", weight_decay=0.0,
    adam_beta1=given["betas"][0], adam_beta2=given["betas"][1], adam_epsilon=given["epsilon"],
    max_grad_norm=given["clip_norm"], assistant_only_loss=True, packing=False, max_length=None,
    bf16=False, use_cpu=True, gradient_checkpointing=False, logging_steps=1, report_to="none",
    save_strategy="no", disable_tqdm=True,
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(given["model"], dtype="float32"),
    args=config, train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(given["tokenizer"]),
)
trainer.train()
print(json.dumps([r["loss"] for r in trainer.state.log_history if "loss" in r]))
"""

DPO = """
import json, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

given = json.loads(sys.argv[1])
rows = Dataset.from_list(given["pairs"])
config = DPOConfig(
    output_dir=given["out"], max_steps=given["steps"], learning_rate=given["learning_rate"],
    per_device_train_batch_size=len(rows), lr_scheduler_type="constant", weight_decay=0.0,
    adam_beta1=given["betas"][0], adam_beta2=given["betas"][1], adam_epsilon=given["epsilon"],
    max_grad_norm=given["clip_norm"], beta=given["beta"], max_length=None,
    bf16=False, use_cpu=True, gradient_checkpointing=False, logging_steps=1, report_to="none",
    save_strategy="no", disable_tqdm=True,
)
tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(given["model"], dtype="float32"),
    ref_model=AutoModelForCausalLM.from_pretrained(given["model"], dtype="float32"),
    args=config, train_dataset=rows, processing_class=tokenizer,
)
trainer.train()
print(json.dumps([r["loss"] for r in trainer.state.log_history if "loss" in r]))
"""


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TRL alone, in a folder of its own, beside the libraries that are here."""
    packages: Path = tmp_path_factory.mktemp("trl")
    install = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    words = [sys.executable, "-m", *install, f"--target={packages}", f"trl=={VERSION}"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index in reach: {done.stderr.strip()[-200:]}")
    return packages


def under_trl(packages: Path, script: str, given: dict[str, Any]) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(given)],
        env=os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CONSTANT: dict[str, Any] = {
    "sharding": small_run.sharding("single"),
    "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.0}
    | {"warmup_steps": 0, "decay": "constant"},
}


@pytest.mark.full
def test_losses_are_those_of_trl(ranks: RankPool, folder: Path, trl: Path, tmp_path: Path) -> None:
    """Every step takes all conversations, so that their order makes no difference."""
    tokenizer = (
        run_dir.prepared(prepared(chat_run(folder, 1, name="made", **CONSTANT))) / "tokenizer"
    )
    changes = CONSTANT | {
        "model": {"name": "llama", "source": str(folder / "base")},
        "tokenizer": {"path": str(tokenizer), "vocabulary_tokens": 300},
    }
    run = prepared(chat_run(folder, 1, name="counted", **changes))
    run = chat_run(folder, 1, name="all", training=whole_steps(run), **changes)
    given = {"talks": [talk(n) for n in trained_numbers(run, 60)]}
    theirs = under_trl(trl, SFT, given | asked(run, tmp_path))
    assert taken(ranks, run) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.full
def test_dpo_losses_are_those_of_trl(
    ranks: RankPool, pairs: Path, trl: Path, tmp_path: Path
) -> None:
    run = prepared(pair_run(pairs, 1, name="counted", **CONSTANT))
    run = pair_run(pairs, 1, name="all", training=whole_steps(run), **CONSTANT)
    given = {"pairs": [pair(n) for n in trained_numbers(run, PAIRS)], "beta": run.task.beta}
    theirs = under_trl(trl, DPO, given | asked(run, tmp_path))
    assert taken(ranks, run) == pytest.approx(theirs, abs=1e-5)


def prepared(run: Run) -> Run:
    small_run.ready(run)
    return run


def whole_steps(run: Run) -> dict[str, Any]:
    """Steps that take all samples of a run that was prepared."""
    samples = len(open_samples(run.data, run_dir.prepared(run), "train"))
    sizes = {"global_batch_samples": samples, "microbatch_samples": 1}
    return {"steps": STEPS, "log_every_steps": 1} | sizes


def trained_numbers(run: Run, count: int) -> list[int]:
    """The rows that are not held out."""
    from atoll.data.text_folder import split_corpora

    return [int(n) for n in (~split_corpora(run)[0].held_out(0, count)).nonzero()[0]]


def asked(run: Run, out: Path) -> dict[str, Any]:
    names = {"learning_rate", "betas", "epsilon", "clip_norm"}
    folders = {"out": out, "model": run.model.source}
    folders["tokenizer"] = run_dir.prepared(run) / "tokenizer"
    given = {name: str(path) for name, path in folders.items()}
    return run.optimizer.model_dump(mode="json", include=names) | given | {"steps": STEPS}


def taken(ranks: RankPool, run: Run) -> list[float]:
    """The losses of its steps."""
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    return [*small_run.losses(run_folder).values()]
