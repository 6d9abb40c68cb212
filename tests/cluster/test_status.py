"""Where a run stands: what it wrote itself, then what squeue, sacct and qstat say."""

import json
import stat
import subprocess
import sys

import pytest
import yaml

from atoll import run_dir
from atoll.cluster.status import main, status
from atoll.errors import UserError
from atoll.settings import dumped


@pytest.fixture
def run_folder(composed, here):
    run = composed("facility=generic_slurm", "name=one").run
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    return folder


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Say what the scheduler's programs print; a program without words fails."""

    def say(**programs: str) -> None:
        for name in ("squeue", "sacct", "qstat"):
            path = tmp_path / name
            words = programs.get(name)
            path.write_text(f"#!/bin/sh\necho '{words}'\n" if words else "#!/bin/sh\nexit 1\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))

    return say


CASES = [
    ("slurm", {"squeue": "PENDING|Priority"}, "queued", "waits for Priority"),
    ("slurm", {"squeue": "RUNNING|None"}, "running", "step 7 is the last one"),
    ("slurm", {"squeue": "SIGNALING|None"}, "running", "step 7 is the last one"),
    ("slurm", {"sacct": "TIMEOUT|0:15"}, "failed", "its wall time was over"),
    ("slurm", {"sacct": "CANCELLED by 1000|0:15"}, "failed", "it was cancelled"),
    ("slurm", {"sacct": "OUT_OF_MEMORY|0:125"}, "failed", "memory was full"),
    ("slurm", {"sacct": "FAILED|2:0"}, "failed", "exit code 2:0"),
    ("slurm", {}, "unknown", "neither squeue nor sacct"),
    ("pbs", {"qstat": "9.host name user 00:00 R batch"}, "running", "job 9"),
    ("pbs", {"qstat": "9.host name user 00:00 Q batch"}, "queued", "job 9"),
    ("pbs", {}, "failed", "pbs.out"),
]


@pytest.mark.parametrize(("kind", "says", "state", "why"), CASES)
def test_what_the_scheduler_says(kind, says, state, why, run_folder, scheduler):
    scheduler(**says)
    run_dir.jobs_file(run_folder).write_text(f"{kind} 8\n{kind} 9\n")
    lines = [{"event": "start"}, {"event": "train", "step": 7, "loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run_dir.metrics_file(run_folder).write_text(text)
    answer = status(run_folder)
    assert answer[0] == state
    assert why in answer[1]


def test_restarts_are_counted(run_folder, scheduler):
    scheduler(squeue="RUNNING|None")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    run_dir.restarts_file(run_folder).write_text("{}\n{}\n")
    assert "job 9, restarted 2 times" in status(run_folder)[1]


def test_a_result_counts_more_than_the_scheduler(run_folder, scheduler, capsys):
    scheduler(sacct="FAILED|1:0")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    run_dir.export(run_folder).mkdir()
    run_dir.result_file(run_folder).write_text(json.dumps({"steps": 6, "perplexity": 3.5}))
    assert main(["one"]) == 0
    assert capsys.readouterr().out == "one: finished, 6 steps, perplexity 3.5\n"


def test_a_run_that_no_scheduler_knows(run_folder, scheduler):
    state, why = status(run_folder)
    assert state == "not finished"
    assert "no step yet" in why


def test_a_folder_that_is_no_run(here):
    with pytest.raises(UserError, match="no run at nowhere"):
        main(["nowhere"])


LIVE = """
import fcntl, json, os, sys, time
held = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(held, fcntl.LOCK_EX)
with open(sys.argv[1] + "/metrics.jsonl", "a") as file:
    for line in sys.argv[2:]:
        file.write(line[:9])
        file.flush()
        time.sleep(0.5)
        file.write(line[9:] + "\\n")
        file.flush()
"""


def test_a_run_is_followed_until_it_has_ended(composed, here, capfd, monkeypatch):
    """By another process, while its lines appear, a half at a time."""
    monkeypatch.setattr("atoll.cluster.status.POLL_SECONDS", 0.1)
    run = composed("facility=laptop", "name=two").run
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    rates = {"loss": 4.5, "tokens_per_second": 1234.0, "step_seconds": 10.0}
    lines = [
        {"event": "start", "steps": 8},
        {"event": "train", "step": 1, **rates},
        {"event": "evaluation", "step": 1, "loss": 4.0, "perplexity": 54.6, "targets": 9},
    ]
    words = [sys.executable, "-c", LIVE, str(folder), *map(json.dumps, lines)]
    with subprocess.Popen(words) as process:
        while status(folder)[0] != "running":
            assert process.poll() is None
        assert main(["--follow", "two"]) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "two: running, no step yet"
    assert said[1] == "step      1/8  loss 4.5000  1,234 tokens/s  1:10 left"
    assert said[2] == "step      1  held-out loss 4, perplexity 54.6"
    assert said[3].startswith("two: not finished, step 1 is the last one")
