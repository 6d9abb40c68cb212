"""The shell of a job: it hears of its time limit, waits for its ranks, queues the run again."""

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.cluster.job_script import around_job, launch_script

# A run's ranks: they end when told to, and say by a file that the run should go on.
RANKS = """#!/bin/bash
echo ranks "$@" >> {log}
until [[ -e {stop} ]]; do sleep 0.05; done
{leave}
exit 143
"""
PROGRAM = """#!/bin/bash
echo {name} "$@" >> {log}
env | grep ^SLURM_ >> {log}
echo Welcome to the machine; echo "8;cluster"
exit {code}
"""


@pytest.fixture
def job(composed, tmp_path):
    """Start a run's launch.sh with ranks that stop, and programs that log: (process, log)."""

    def start(*overrides: str, leave_marker: bool = True, requeue_code: int = 0):
        run = composed("image=none", "name=x", *overrides).run
        folder = run_dir.folder(run)
        run_dir.write_whole(run_dir.job_script(folder), around_job())
        log, bin_folder = tmp_path / "log", tmp_path / "bin"
        bin_folder.mkdir()
        leave = f"touch {run_dir.restart_file(folder)}" if leave_marker else ""
        ranks = RANKS.format(log=log, stop=run_dir.stop_file(folder), leave=leave)
        programs = {name: (name, 0) for name in ("sbatch", "qsub")}
        programs["scontrol"] = ("scontrol", requeue_code)
        texts = {
            name: PROGRAM.format(name=name, log=log, code=code)
            for name, (_, code) in programs.items()
        }
        for name, text in (texts | {"srun": ranks, "mpiexec": ranks}).items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755 | stat.S_IXUSR)
        script = launch_script(run, folder, Path("/clone/sbatch/train.sbatch"))
        # the tokens are prepared already
        lines = [text for text in script.splitlines() if " tokenize " not in text]
        environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        environment["ENVIRONMENT"] = "BATCH"
        run_dir.write_whole(run_dir.launch_script(folder), "\n".join(lines))
        process = subprocess.Popen(["bash", run_dir.launch_script(folder)], env=environment)
        deadline = time.monotonic() + 20
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return process, log

    return start


def test_the_warning_stops_the_ranks_and_requeues_the_job(job):
    process, log = job("facility=generic_slurm")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == run_dir.REQUEUED_CODE
    assert "scontrol requeue 7" in log.read_text()
    assert "\nsbatch" not in log.read_text()


@pytest.mark.parametrize("words", [["facility.requeue=false"], []])
def test_where_no_job_is_taken_back_another_one_is_chained(words, job):
    process, log = job("facility=generic_slurm", *words, requeue_code=1)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == run_dir.REQUEUED_CODE
    text = log.read_text()
    assert ("scontrol requeue" in text) == (not words)
    [chained] = [line for line in text.splitlines() if line.startswith("sbatch ")]
    assert "--dependency=singleton" in chained
    assert chained.endswith("/clone/sbatch/train.sbatch " + chained.split()[-1])
    after = text.split(chained)[1]
    assert "SLURM_JOB_ID" not in after  # the next job is given what it needs by Slurm
    jobs = run_dir.jobs_file(Path(chained.split()[-1]))
    assert jobs.read_text() == "slurm 7\nslurm 8\n"  # where atoll status looks for the living one


def test_ranks_that_fail_are_not_started_again(job):
    process, log = job("facility=generic_slurm", leave_marker=False)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == 143
    assert "requeue" not in log.read_text()


def test_a_warning_is_heard_whatever_the_job_s_shell_is_at(job):
    """Bash 5.2 cannot run a trap while it expands $( ), of which placing the ranks has some."""
    process, _ = job("facility=generic_slurm")
    while process.poll() is None:
        process.send_signal(signal.SIGUSR2)
        time.sleep(0.002)
    assert process.returncode == run_dir.REQUEUED_CODE


def test_pbs_looks_at_the_clock_and_chains_a_job(job):
    time_words = ["facility.walltime_minutes=1", "restart.notice_seconds=59"]
    process, log = job("facility=testbed_pbs", *time_words)
    assert process.wait(20) == run_dir.REQUEUED_CODE
    [chained] = [line for line in log.read_text().splitlines() if line.startswith("qsub ")]
    assert chained.startswith("qsub -W depend=afterany:7 ")
    assert "walltime=00:1:00" in chained


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("select=1", 3 * 3600), ("select=1,walltime=01:00:00", 3600), ("walltime=30:00", 1800)],
)
def test_the_clock_is_that_of_the_job_whoever_states_its_time(composed, words, seconds, tmp_path):
    """A time limit among the words of `-l` is the job's, whatever walltime_minutes says."""
    line = ("facility=testbed_pbs", "name=x", "facility.walltime_minutes=180")
    run = composed(*line, f"facility.submit.l=['{words}']").run
    script = launch_script(run, tmp_path, None)
    [source] = [text for text in script.splitlines() if text.startswith("source ")]
    assert source.split()[-1] == str(seconds - run.restart.notice_seconds)
