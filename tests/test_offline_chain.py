"""Conversations prepared where there is a network; where there is none, one line does the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_export
import small_run

from atoll import run_dir

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
LINE = ["facility=laptop", "ranks_per_node=2", "experiment=chat_sft", "evaluation.tasks=[sums]"]
LINE += ["data.sequence_tokens=128", "data.validation.fraction=0.2", "generation.max_new_tokens=4"]
LINE += ["training.global_batch_samples=4", "optimizer.warmup_steps=0"]
LINE += ["optimizer.learning_rate=0.01", "tokenizer.chat_template=chatml"]
LINE += ["tokenizer.add_tokens=['<|im_start|>','<|im_end|>']"]
# whoever asks for a network is refused at once
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")


def atoll(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "atoll", *words],
        cwd=folder,
        env=os.environ | NO_NETWORK,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A model shaped as Qwen3, conversations, and a task of one's own."""
    folder = tmp_path / "home"
    (folder / "tasks").mkdir(parents=True)
    small_export.exported(folder, "qwen3").rename(folder / "base")
    pairs = [(f"What is {n} and {n}?", f"It is {n + n}.") for n in range(40)]
    roles = ("user", "assistant")
    talks = [[{"role": r, "content": c} for r, c in zip(roles, p, strict=True)] for p in pairs]
    write_lines(folder / "talks.jsonl", [{"messages": talk} for talk in talks])
    asked = [{"question": q, "choices": [a, "Yes."], "answer": 0} for q, a in pairs[:6]]
    write_lines(folder / "tasks" / "rows.jsonl", asked)
    task = TASK.replace("ROWS", str(folder / "tasks" / "rows.jsonl"))
    (folder / "tasks" / "sums.yaml").write_text(task)
    return folder


@pytest.mark.full
def test_a_bundle_of_conversations_trains_scores_and_answers(home: Path, tmp_path: Path) -> None:
    away = tmp_path / "facility"
    away.mkdir()
    line = [*LINE, f"model.source={home}/base", f"data.files=[{home}/talks.jsonl]"]
    atoll(home, "prepare", "--into", "bundle", *line, "evaluation.tasks_folder=tasks")
    (home / "bundle").rename(away / "bundle")
    home.rename(tmp_path / "out-of-reach")
    words = ["folders.bundle=bundle", "name=chain", "--then", "evaluate,report"]
    atoll(away, "submit", *line, *words)
    folder = away / "runs" / "chain"
    before, *_, after = small_run.records(folder, "evaluation")
    assert after["loss"] < before["loss"] and after["targets"] == before["targets"]
    figures = json.loads(run_dir.scores_file(folder).read_text())["tasks"]["sums"]
    assert figures["acc"] == after["sums/acc"], "the run scored what it exported"
    assert "sums" in (folder / "report.html").read_text()
    said = atoll(away, "generate", str(folder), "--chat", "--prompt", "Who are you?")
    assert "user: Who are you?\nassistant: " in said
