"""One job holds a run: job.sh takes, renews and hands on the lease, lease_of reads it."""

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.cluster.job_script import around_job
from atoll.cluster.lease import lease_of

QUICK = around_job().replace("renew_seconds=10 watch_seconds=60", "renew_seconds=1 watch_seconds=4")
ELSEWHERE = "another-boot:pid:[1]"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a run"
    run_dir.write_whole(run_dir.job_script(folder), QUICK)
    return folder


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put what the scheduler's programs print on the PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def add(**texts: str) -> None:
        for name, text in texts.items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)

    add(squeue="exit 1", qstat="exit 1")
    return add


def job(folder: Path, scheduler: str, number: str, *, seconds: str = "", **more: str):
    """Start a job of the run that holds it until a line comes in."""
    batch = {"SLURM_JOB_ID": number, "SLURMD_NODENAME": "n7", "ENVIRONMENT": "BATCH"}
    variables = {**batch, **more}
    words = shlex.join([str(folder), scheduler, *([seconds] if seconds else [])])
    script = f"set -euo pipefail\nsource {shlex.quote(str(folder / 'job.sh'))} {words}\n"
    file = folder / f"launch-{number}.sh"
    file.write_text(f"{script}echo holds\nread -r line\nexit 3\n")
    return subprocess.Popen(
        ["bash", str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


def left_by(folder: Path, *words: str) -> Path:
    """The lease of a job that nobody sees from here."""
    lease = run_dir.lease_folder(folder) / "4"
    lease.parent.mkdir()
    lease.write_text(" ".join(words) + "\n")
    return lease


def test_the_second_job_is_refused_at_once_with_the_owner_s_name(folder, programs):
    first = job(folder, "slurm", "41")
    assert first.stdout.readline() == "holds\n"
    assert lease_of(folder).alive
    second = job(folder, "slurm", "42")
    _, errors = second.communicate(timeout=10)
    assert second.returncode == 2
    found, hint = errors.splitlines()
    assert found.startswith("atoll: run a run is running already: slurm job 41 on n7 holds ")
    assert "name=NAME" in hint
    assert first.poll() is None
    assert run_dir.jobs_file(folder).read_text() == "slurm 41\nslurm 42 refused\n"
    [began] = run_dir.held_file(folder).read_text().splitlines()
    assert began.startswith("began 1 ") and float(began.split()[2]) <= time.time()
    first.communicate("\n", timeout=10)
    assert first.returncode == 3
    assert run_dir.held_file(folder).read_text().splitlines()[1].startswith("ended 1 ")
    lease = lease_of(folder)
    assert (lease.job, lease.node, lease.alive) == ("41", "n7", False)
    third = job(folder, "slurm", "43")
    assert third.communicate("\n", timeout=10)[0] == "holds\n"


def test_of_many_at_the_same_moment_one_is_taken(folder, programs):
    jobs = [job(folder, "slurm", str(number)) for number in range(8)]
    deadline = time.monotonic() + 30
    while sum(each.poll() is None for each in jobs) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    [holder] = [each for each in jobs if each.poll() is None]
    holder.communicate("\n", timeout=10)
    assert sorted(each.returncode for each in jobs) == [2] * 7 + [3]


@pytest.mark.login_node
def test_a_killed_job_leaves_its_run_to_the_next(folder, programs):
    first = job(folder, "slurm", "41")
    first.stdout.readline()
    subprocess.run(["pkill", "-KILL", "-P", str(first.pid)], check=True)
    first.wait()
    deadline = time.monotonic() + 10
    while lease_of(folder).alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "ended 1 " in run_dir.held_file(folder).read_text()
    output, _ = job(folder, "slurm", "42").communicate("\n", timeout=10)
    assert output == "holds\n"


def test_processes_that_outlive_their_job_s_shell_hold_the_run(folder, programs):
    line = f"source {shlex.quote(str(folder / 'job.sh'))} {shlex.quote(str(folder))} none"
    text = f"set -euo pipefail\n{line}\nsleep 30 &\necho $!\nread -r line"
    ranks = subprocess.PIPE
    with subprocess.Popen(["bash", "-c", text], stdin=ranks, stdout=ranks, text=True) as first:
        sleeper = int(first.stdout.readline())
        first.kill()
    second = job(folder, "none", "")
    assert second.wait(10) == 2
    os.kill(sleeper, 9)
    time.sleep(1)
    assert job(folder, "none", "").communicate("\n", timeout=10)[0] == "holds\n"


# OpenPBS's; its S is no state
PBS_HEADER = 'echo "Job id Name User Time Use S Queue"; echo "------ ---- ---- -------- - -----"'


@pytest.mark.parametrize(
    ("scheduler", "says", "taken"),
    [
        ("slurm", {"squeue": "echo RUNNING"}, False),
        ("slurm", {"squeue": "echo SUSPENDED"}, False),
        ("slurm", {"squeue": "echo COMPLETED"}, True),
        ("slurm", {"squeue": "echo PENDING"}, True),
        ("slurm", {"squeue": "echo slurm_load_jobs error: Invalid job id specified; exit 1"}, True),
        ("slurm", {"squeue": "echo welcome to this machine; echo RUNNING"}, False),
        ("pbs", {"qstat": "echo 7.host name user 0 R prod"}, False),
        ("pbs", {"qstat": f"{PBS_HEADER}; echo 7.host name user 0 R prod"}, False),
        ("pbs", {"qstat": f"{PBS_HEADER}; echo 7.host name user 0 Q prod"}, True),
        ("pbs", {"qstat": "echo 7.host name user 0 S prod"}, False),
        ("pbs", {"qstat": "echo qstat: Unknown Job Id 7.host; exit 153"}, True),
        ("pbs", {"qstat": "echo qstat: 7.host Job has finished; exit 35"}, True),
    ],
)
def test_the_scheduler_is_asked_for_a_job_elsewhere(scheduler, says, taken, folder, programs):
    programs(**says)
    left_by(folder, scheduler, "7", "0", "n3", "1", "1", ELSEWHERE)
    started = time.monotonic()
    output, errors = job(folder, scheduler, "9").communicate("\n", timeout=10)
    assert ("holds\n" in output, f"{scheduler} job 7 on n3 holds" in errors) == (taken, not taken)
    assert (f"{scheduler} job 7 on n3 ended without a word" in output) == taken
    assert time.monotonic() - started < 3


def test_a_requeued_job_takes_over_its_own_lease_at_once(folder, programs):
    left_by(folder, "slurm", "9", "0", "n3", "1", "1", ELSEWHERE)
    started = time.monotonic()
    output, _ = job(folder, "slurm", "9", SLURM_RESTART_COUNT="1").communicate("\n", timeout=10)
    assert output.endswith("holds\n")
    assert time.monotonic() - started < 3


def test_where_no_scheduler_answers_a_renewed_lease_is_alive_whatever_its_clock(folder, programs):
    lease = left_by(folder, "slurm", "7", "0", "n3", "1", "1", ELSEWHERE)
    os.utime(lease, (1, 1))
    second = job(folder, "slurm", "9")
    time.sleep(1)
    lease.write_text(lease.read_text() + "renewed\n")
    os.utime(lease, (1, 1))
    assert second.wait(10) == 2


def test_where_no_scheduler_answers_a_lease_nobody_renews_is_taken(folder, programs):
    lease = left_by(folder, "slurm", "7", "0", "n3", "1", "1", ELSEWHERE)
    os.utime(lease, (2**32, 2**32))  # the clock of its node is far ahead
    output, _ = job(folder, "slurm", "9").communicate("\n", timeout=15)
    assert output.endswith("holds\n")
    assert [path.name for path in run_dir.lease_folder(folder).glob("[0-9]*")] == ["5"]


def test_the_holder_renews(folder, programs):
    first = job(folder, "slurm", "41")
    first.stdout.readline()
    file = run_dir.lease_folder(folder) / "1"
    before, deadline = file.read_text(), time.monotonic() + 10
    while file.read_text() == before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "renewed" in file.read_text()
    assert file.read_text().splitlines()[0] == before.splitlines()[0]
    first.communicate("\n", timeout=10)


def test_a_clock_ends_with_its_job(folder, programs):
    first = job(folder, "pbs", "41", seconds="2")
    first.stdout.readline()
    first.communicate("\n", timeout=10)
    time.sleep(3)
    assert not run_dir.stop_file(folder).exists()
    second = job(folder, "pbs", "42", seconds="1")
    second.stdout.readline()
    deadline = time.monotonic() + 10
    while not run_dir.stop_file(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run_dir.stop_file(folder).exists()
    second.communicate("\n", timeout=10)


def test_the_output_of_a_job_queued_by_hand_is_found_in_its_run(folder, tmp_path, programs):
    output = tmp_path / "slurm-41.out"
    line = f"source {shlex.quote(str(folder / 'job.sh'))} {shlex.quote(str(folder))} slurm"
    with output.open("w") as file:
        environment = os.environ | {"SLURM_JOB_ID": "41", "ENVIRONMENT": "BATCH"}
        (script := folder / "launch.sh").write_text(f"set -eu\n{line}\n")
        subprocess.run(["bash", script], env=environment, stdout=file)
    assert (folder / "slurm-41.out").resolve() == output
    assert run_dir.jobs_file(folder).read_text() == "slurm 41\n"


def test_an_allocation_of_a_person_s_is_written_down_as_one(folder, programs):
    """It lives on behind the run, which may be started in it again."""
    for _ in range(2):
        job(folder, "slurm", "41", ENVIRONMENT="").communicate("\n", timeout=10)
    job(folder, "pbs", "42", PBS_JOBID="42.host", ENVIRONMENT="").communicate("\n", timeout=10)
    batch = {"ENVIRONMENT": "", "PBS_ENVIRONMENT": "PBS_BATCH"}
    job(folder, "pbs", "43", PBS_JOBID="43.host", **batch).communicate("\n", timeout=10)
    assert run_dir.jobs_file(folder).read_text() == "slurm 41 here\npbs 42.host here\npbs 43.host\n"


def test_a_full_disk_is_told_in_two_lines(folder):
    run_dir.lease_folder(folder).write_text("")  # no folder can be made here
    done = job(folder, "none", "")
    _, errors = done.communicate("\n", timeout=10)
    assert done.returncode != 0
    assert "Traceback" not in errors


@pytest.mark.login_node
def test_a_job_whose_run_was_taken_over_ends(folder, programs, tmp_path):
    """However it came: two must not train one run. It queues nothing, and leaves all files."""
    programs(sbatch=f"touch {tmp_path}/queued", squeue="echo RUNNING")
    text = """requeue() { sbatch; }
source "${0%/*}/job.sh" "${0%/*}" slurm
echo holds
run_ranks sleep 60"""
    (script := folder / "launch.sh").write_text(f"set -euo pipefail\n{text}")
    first = subprocess.Popen(
        ["bash", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"SLURM_JOB_ID": "41"},
    )
    assert first.stdout.readline() == "holds\n"
    leases = run_dir.lease_folder(folder)
    (leases / "2").write_text(f"slurm 42 0 n8 1 1 {ELSEWHERE}\n")
    run_dir.restart_file(folder).touch()  # of the other
    run_dir.faults_file(folder).write_text('{"kind": "died"}\n')
    started = time.monotonic()
    output, _ = first.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert "another job has taken the run over" in output
    assert first.returncode not in (0, run_dir.RESTART_CODE)
    assert (leases / "2").read_text().startswith("slurm 42 ")
    assert "ended" not in (leases / "1").read_text()
    assert run_dir.restart_file(folder).exists()
    assert not (tmp_path / "queued").exists()
