"""Prepared where there is a network, then trained, scored and reported where there is none."""

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
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
LINE = ["facility=laptop", "ranks_per_node=2", "sharding=full_shard", "precision=fp32"]
LINE += [
    "model=from_path",
    "data=text_files",
    "data.document=line",
    "data.sequence_tokens=32",
    "data.validation.fraction=0.2",
]
LINE += ["training.steps=2", "training.global_batch_samples=4", "evaluation.tasks=[colours]"]
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


@pytest.mark.full
def test_a_bundle_trains_scores_and_reports_in_one_line(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "facility"
    tasks = home / "tasks"
    tasks.mkdir(parents=True)
    away.mkdir()
    small_export.exported(home, "qwen3").rename(home / "base")
    (home / "text.txt").write_text(small_run.shared_text().read_text())
    rows = [{"question": f"The {n} is", "choices": ["red", "green"], "answer": 0} for n in range(6)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "colours.yaml").write_text(TASK.replace("rows.jsonl", f"{tasks}/rows.jsonl"))
    line = [*LINE, f"model.source={home}/base", f"data.files=[{home}/text.txt]"]
    atoll(home, "prepare", "--into", "bundle", *line, "evaluation.tasks_folder=tasks")
    (home / "bundle").rename(away / "bundle")
    home.rename(tmp_path / "out-of-reach")
    words = [*line, "folders.bundle=bundle", "name=chain", "--then", "evaluate,report"]
    atoll(away, "submit", *words)
    folder = away / "runs" / "chain"
    figures = json.loads(run_dir.scores_file(folder).read_text())["tasks"]["colours"]
    own = small_run.records(folder, "evaluation")[-1]
    assert figures["acc"] == own["colours/acc"], "the run scored what it exported"
    assert "colours" in (folder / "report.html").read_text()
