"""Ctrl-C in a run without a scheduler is one line with what goes on; a failed start leaves why."""

import os
import signal
import subprocess
import time

import small_run

from atoll import run_dir
from atoll.__main__ import main
from atoll.cluster.job_script import around_job
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
