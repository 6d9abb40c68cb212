"""Ctrl-C in a run without a scheduler is one line with what goes on; a failed start leaves why."""

import fcntl
import os
import pty
import signal
import subprocess
import termios
import time

import pytest
import small_run

from atoll import run_dir
from atoll.__main__ import main
from atoll.cluster.job_script import around_job
from atoll.cluster.lease import lease_of
from atoll.cluster.status import status
from atoll.errors import FAILURE, UserError, keep_failure


def test_ctrl_c_ends_in_the_command_that_goes_on(tmp_path):
    folder = tmp_path / "a run"
    run_dir.write_whole(run_dir.job_script(folder), around_job())
    script = run_dir.launch_script(folder)
    run_dir.write_whole(
        script, f"set -euo pipefail\nsource '{folder}/job.sh' '{folder}' none\nsleep 60\n"
    )
    run_dir.write_whole(run_dir.checkpoint(folder, 7) / "manifest.json", "{}")
    words = ["bash", str(script)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 30
    while not list(run_dir.lease_folder(folder).glob("1")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # until it sleeps
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    [line] = errors.splitlines()
    path = str(script).replace(" ", "\\ ")
    assert line == f"atoll: stopped, step 7 is saved; this goes on: bash {path}"


@pytest.mark.parametrize(
    ("srun", "times"),
    [
        # its ranks save, say so by a file, and end with a code of theirs
        ('until [[ -e "$run/stop" ]]; do sleep 0.1; done; touch "$run/restart"; exit 200', 1),
        ("exec sleep 60", 2),
    ],
)
def test_ctrl_c_in_an_allocation_ends_the_ranks_and_keeps_it(srun, times, tmp_path, monkeypatch):
    """All below the shell of a job ignore Ctrl-C; nothing may train on unseen."""
    folder = tmp_path / "a run"
    run_dir.write_whole(run_dir.job_script(folder), around_job())
    run_dir.write_whole(run_dir.checkpoint(folder, 7) / "manifest.json", "{}")
    text = f"requeue() {{ touch '{folder}/queued'; }}\nrun_ranks srun\ntouch '{folder}/went-on'\n"
    script = run_dir.launch_script(folder)
    run_dir.write_whole(script, f"source '{folder}/job.sh' '{folder}' slurm\nset -eu\n{text}")
    began = folder / "began"
    (tmp_path / "srun").write_text(f"#!/bin/bash\nrun='{folder}'\ntouch '{began}'\n{srun}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    typed, terminal = pty.openpty()
    process = subprocess.Popen(
        ["bash", str(script)],
        stdin=terminal,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    deadline = time.monotonic() + 30
    while not began.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(times):
        os.write(typed, b"\x03")
        time.sleep(0.3)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.startswith("atoll: the ranks save their state and end")
    path = str(script).replace(" ", "\\ ")
    line = f"atoll: stopped, step 7 is saved; this goes on: bash {path}"
    assert errors.splitlines()[-1] == line
    assert not any((folder / name).exists() for name in ("queued", "went-on", "restart"))
    assert not lease_of(folder).alive
    while is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(process.pid)


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_failed_start_leaves_its_reason_and_no_empty_folder(tmp_path, capsys):
    text = small_run.write_text(tmp_path)
    run = small_run.settings(tmp_path, 1, folders__prepared=str(tmp_path / "prepared"))
    folder = run_dir.folder(run)
    text.unlink()
    text.write_bytes("Grüße\nan alle\n".encode("latin-1") * 20)
    run = run.model_copy(update={"data": run.data.model_copy(update={"files": [str(text)]})})
    small_run.write_settings(run)
    assert main(["tokenize", str(folder)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    state, why = status(folder)
    assert state == "failed" and why.startswith(f"{text} is not UTF-8")
    assert "no step yet" not in why
    assert list((tmp_path / "prepared").iterdir()) == []


def test_a_mistake_that_a_later_start_got_past_is_forgotten(tmp_path):
    keep_failure(UserError("too little", "more"), tmp_path)
    refused_at = (tmp_path / FAILURE).stat().st_mtime
    lines = [("train", refused_at - 60), ("fault", refused_at + 1)]  # a rank without a port, say
    for event, at in lines:
        run_dir.append_record(run_dir.metrics_file(tmp_path), {"event": event, "time": at})
    assert run_dir.failure(tmp_path) == "too little; more"
    later = {"event": "start", "time": refused_at + 60}
    run_dir.append_record(run_dir.metrics_file(tmp_path), later)
    assert run_dir.failure(tmp_path) == ""


def test_a_mistake_is_kept_where_the_disk_takes_it(tmp_path):
    keep_failure(UserError("too little", "more"), tmp_path)
    assert run_dir.failure(tmp_path) == "too little; more"
    keep_failure(UserError("too little", "more"), tmp_path / "nowhere")
