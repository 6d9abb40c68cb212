"""The same conversations under TRL's SFT trainer give the same losses, step by step."""

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

from atoll import run_dir
from atoll.data.loader import open_samples

__all__ = ["folder"]

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


@pytest.mark.full
def test_losses_are_those_of_trl(ranks: RankPool, folder: Path, trl: Path, tmp_path: Path) -> None:
    """Every step takes all conversations, so that their order makes no difference."""
    changes: dict[str, Any] = {
        "sharding": small_run.sharding("single"),
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.0}
        | {"warmup_steps": 0, "decay": "constant"},
    }
    ready = chat_run(folder, 1, name="counted", **changes)
    prepared = small_run.ready(ready) and run_dir.prepared(ready)
    samples = len(open_samples(ready.data, prepared, "train"))
    held_out = held_out_numbers(ready)
    training: dict[str, Any] = {
        "steps": STEPS,
        "global_batch_samples": samples,
        "microbatch_samples": 1,
    }
    training |= {"log_every_steps": 1}
    model = {"name": "llama", "source": str(folder / "base")}
    tokenizer = {"path": str(prepared / "tokenizer"), "vocabulary_tokens": 300}
    run = chat_run(
        folder, 1, name="all", training=training, model=model, tokenizer=tokenizer, **changes
    )
    run_folder = small_run.ready(run)
    ranks.run(small_run.train_here, run, world=1)
    given = {
        "talks": [talk(n) for n in range(60) if n not in held_out],
        "out": str(tmp_path),
        "model": str(folder / "base"),
        "tokenizer": str(prepared / "tokenizer"),
        "steps": STEPS,
    } | run.optimizer.model_dump(
        mode="json", include={"learning_rate", "betas", "epsilon", "clip_norm"}
    )
    theirs = under_trl(trl, SFT, given)
    assert [*small_run.losses(run_folder).values()] == pytest.approx(theirs, abs=2e-4)


def held_out_numbers(run: Any) -> set[int]:
    from atoll.data.tokenize import _sources

    return {int(n) for n in _sources(run)[0].held_out(0, 60).nonzero()[0]}
