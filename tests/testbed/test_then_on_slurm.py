"""A run, its scores and its report in one line, on a real Slurm and offline."""

import json
import subprocess

import pytest

from atoll import run_dir
from atoll.cluster import then

TASK = """\
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.mark.full
def test_scores_and_a_report_follow_a_run_that_was_queued_again(site):
    tasks = site.clone / "own-tasks"
    tasks.mkdir(exist_ok=True)
    rows = [{"question": f"The {n} is", "choices": ["red", "green"], "answer": 0} for n in range(6)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "colours.yaml").write_text(TASK.format(data=tasks / "rows.jsonl"))
    words = ["nodes=2", "training.steps=6", f"evaluation.tasks_folder={tasks}", "--then"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    job = site.submit("followed", *words, "evaluate,report", "--tasks", "colours", **offline)
    folder = site.clone / "runs" / "followed"
    site.until("followed", lambda: run_dir.metrics_file(folder).exists())
    subprocess.run(["scontrol", "requeue", job], check=True)
    assert "what follows it: job" in site.status("followed")
    site.finished("followed")
    page, scores = folder / "report.html", run_dir.scores_file(folder)
    site.until("followed", page.exists)
    figures = json.loads(scores.read_text())["tasks"]["colours"]
    assert 0.0 <= figures["acc"] <= 1.0
    assert "colours" in page.read_text()
    assert len(then.then_jobs(folder)) == 1, "Slurm itself waited for the run that it took back"
    lines = [x for x in site.output("followed").splitlines() if x.startswith("colours  acc  ")]
    assert len(lines) == 1, "the first rank alone says so"
