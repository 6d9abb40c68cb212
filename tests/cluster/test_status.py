"""Where a run stands: what it wrote itself, then what squeue, sacct and qstat say."""

import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from atoll import run_dir
from atoll.cluster import status as status_module
from atoll.cluster.job_control import cancel
from atoll.cluster.jobs import Job, pbs_jobs
from atoll.cluster.listing import status_of as main
from atoll.cluster.status import _progress, follow, status
from atoll.errors import UserError, keep_failure
from atoll.health.exclusions import Exclusion, exclude
from atoll.health.faults import Fault, add_fault
from atoll.health.restarts import add_restart, count_anew, restarts
from atoll.settings import dumped, load_run


@pytest.fixture
def run_folder(composed, here):
    run = composed("facility=generic_slurm", "name=one").run
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    return folder


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Say what the scheduler's programs print; one without words fails: qstat knows no such job."""

    def say(**programs: str) -> None:
        for name in ("squeue", "sacct", "qstat"):
            path = tmp_path / name
            words = programs.get(name)
            fails = "echo 'qstat: Unknown Job Id' >&2; exit 153" if name == "qstat" else "exit 1"
            path.write_text(
                f"#!/bin/sh\nprintf '%s\\n' '{words}'\n" if words else f"#!/bin/sh\n{fails}\n"
            )
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))

    return say


def test_one_job_that_pbs_knows_no_more_hides_no_other(scheduler, tmp_path):
    """`qstat -x 7 9` tells of 9, and fails for 7."""
    scheduler()
    qstat = tmp_path / "qstat"
    qstat.write_text(
        '#!/bin/sh\n[ "$1" = -x ] && echo "9.host name user 00:00 F batch"\nexit 153\n'
    )
    answers = pbs_jobs(["7.host", "9.host"])
    assert answers["9.host"].code == "F" and answers["7.host"].code == ""


@pytest.mark.parametrize(
    ("words", "code", "state"),
    [
        ("qstat: Batch protocol error", 183, "unknown"),  # pbs_errno & 255
        ("qstat: Invalid credential", 171, "unknown"),
        ("cannot connect to server host (errno=15010)", 2, "unknown"),
        ("qstat: Unknown Job Id 19.host", 1, "unknown"),  # another one
        ("qstat: Unknown Job Id 9.host", 1, "failed"),
        ("qstat: 9.host Job has finished, use -x or -H", 1, "failed"),
        ("qstat: no such job, in a site's words", 153, "failed"),
        ("qstat: no such job, in a site's words", 35, "failed"),
    ],
)
def test_a_pbs_that_does_not_answer_has_not_ended_a_job(words, code, state, scheduler, tmp_path):
    """A campaign would submit it again, beside the one that runs."""
    scheduler()
    (tmp_path / "qstat").write_text(f'#!/bin/sh\necho "{words}" >&2\nexit {code}\n')
    answer = pbs_jobs(["9.host"])["9.host"]
    assert answer.state == state
    assert state == "failed" or answer.why == words


def test_a_cancelled_pbs_job_is_called_so(scheduler, tmp_path):
    """Both of its shells end with 143 where they hear TERM."""
    scheduler()
    (tmp_path / "qstat").write_text(
        '#!/bin/sh\n[ "$2" = -f ] && echo "    Exit_status = 143" && exit\n'
        '[ "$1" = -x ] && echo "9.host name user 00:00 F batch"\n'
    )
    assert pbs_jobs(["9.host"])["9.host"].why.startswith("it was cancelled")


CASES = [
    ("slurm", {"squeue": "9|9|PENDING|Priority"}, "queued", "waits for Priority"),
    ("slurm", {"squeue": "9|9|RUNNING|None"}, "running", "step 7 is the last one"),
    ("slurm", {"squeue": "9|9|SIGNALING|None"}, "running", "step 7 is the last one"),
    ("slurm", {"sacct": "9|TIMEOUT|0:15|n1"}, "failed", "its wall time was over"),
    ("slurm", {"sacct": "9|CANCELLED by 1000|0:15|n1"}, "failed", "it was cancelled"),
    ("slurm", {"sacct": "9|OUT_OF_MEMORY|0:125|n1"}, "failed", "memory was full"),
    ("slurm", {"sacct": "9|FAILED|2:0|n1"}, "failed", "exit code 2:0"),
    ("slurm", {}, "unknown", "neither squeue nor sacct"),
    ("pbs", {"qstat": "9.host name user 00:00 R batch"}, "running", "job 9"),
    ("pbs", {"qstat": "9.host name user 00:00 Q batch"}, "queued", "job 9"),
    ("pbs", {}, "failed", "pbs.out"),
    ("slurm", {"squeue": "9|9|SUSPENDED|None"}, "running", "suspended by the scheduler"),
    ("slurm", {"squeue": "9|9|SPECIAL_EXIT|JobHeldUser"}, "queued", "waits for JobHeldUser"),
    ("slurm", {"squeue": "9|9|BRAND_NEW|None"}, "unknown", "calls it BRAND_NEW"),
    ("slurm", {"sacct": "9|DEADLINE|0:15|n1"}, "failed", "DEADLINE, exit code 0:15"),
    (
        "slurm",
        {"squeue": "9|9|PENDING|BeginTime", "sacct": "9|NODE_FAIL|0:0|n[2-3]\n9|PENDING|0:0|None"},
        "queued",
        "a node failed (it ran on n[2-3]), so it was queued again; waits for BeginTime",
    ),
    *(
        ("pbs", {"qstat": f"9.host name user 00:00 {letter} batch"}, state, why)
        for letter, state, why in [
            ("T", "queued", "in transit"),
            ("H", "queued", "held"),
            ("W", "queued", "waits for its time"),
            ("M", "queued", "moved"),
            ("S", "running", "suspended"),
            ("U", "running", "suspended"),
            ("B", "running", "job 9"),
            ("E", "running", "job 9"),
            ("F", "failed", "pbs.out"),
            ("X", "failed", "pbs.out"),
            ("C", "failed", "pbs.out"),
            ("Z", "unknown", "calls it Z"),
        ]
    ),
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


def test_the_fault_counts_more_than_the_last_words(run_folder, scheduler):
    """srun names the task that it hears of first, which is an innocent one."""
    scheduler(sacct="9|FAILED|1:0|n1")
    run_dir.jobs_file(run_folder).write_text("slurm 8\nslurm 9\n")
    (run_folder / "slurm-9.out").write_text("srun: error: n1: task 0: Killed\n")
    faults = [
        Fault("died", "node", "its process is gone", node="n2", rank=3, step=4, job="8"),
        Fault("stalled", "node", "it is stopped", node="n4", rank=5, step=7, job="9"),
        Fault("slow", "node", "1.4 of the median", node="n6", job="9"),
    ]
    for fault in faults:
        add_fault(run_folder, fault)
    state, why = status(run_folder)
    assert state == "failed" and "rank 5 on n4: step 7: it is stopped" in why
    assert "task 0" not in why and "n2" not in why and "n6" not in why


def test_a_fault_that_the_run_went_on_from_is_not_why_it_failed(run_folder, scheduler):
    scheduler(sacct="9|FAILED|1:0|n1")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    add_fault(run_folder, Fault("died", "node", "it is gone", node="n2", job="9", time=5.0))
    assert "it is gone" in status(run_folder)[1]
    add_restart(run_folder, step=4, began=0, kind="died", job="9")
    assert "it is gone" not in status(run_folder)[1]
    run_dir.restart_file(run_folder).touch()  # the next job could not be queued
    assert "it is gone" in status(run_folder)[1]


def test_a_full_disk_is_told_although_nothing_could_be_written(run_folder, scheduler, monkeypatch):
    scheduler(sacct="9|FAILED|1:0|n1")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    assert "no space" not in status(run_folder)[1]
    full = shutil.disk_usage(run_folder)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert f"no space left on the file system of {run_folder}" in status(run_folder)[1]


def test_a_run_without_a_scheduler_says_who_was_at_fault(run_folder, scheduler):
    add_fault(run_folder, Fault("died", "code", "it failed: ValueError: 3", node="n2", rank=3))
    records = [{"event": "train", "step": 7, "loss": 1.0}, {"event": "fault", "step": 8}]
    metrics = run_dir.metrics_file(run_folder)
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    why = status(run_folder)[1]
    assert "step 7 is the last one" in why and "rank 3 on n2: it failed: ValueError: 3" in why
    with metrics.open("a") as file:
        file.write(json.dumps(records[0]) + "\n")
    assert "rank 3" not in status(run_folder)[1], "it went on since"


def test_restarts_are_counted(run_folder, scheduler):
    scheduler(squeue="9|9|RUNNING|None")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    run_dir.restarts_file(run_folder).write_text("{}\n{}\n")
    assert "job 9, restarted 2 times" in status(run_folder)[1]


def test_what_was_left_out_is_told(run_folder, scheduler):
    scheduler(squeue="9|9|RUNNING|None")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    add_restart(run_folder, step=10)
    add_restart(run_folder, step=20, began=10, kind="stalled")
    exclude(run_folder, {"n2": Exclusion("stalled", "stopped", "8", "now")})
    words = "job 9, restarted 2 times (1 of them after a fault), without n2"
    assert words in status(run_folder)[1]
    run_dir.excluded_file(run_folder).write_text("{")
    assert status(run_folder)[0] == "running"


def test_a_result_counts_more_than_the_scheduler(run_folder, scheduler, capsys):
    scheduler(sacct="9|FAILED|1:0|n1")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    run_dir.export(run_folder).mkdir()
    steps = load_run(run_dir.settings_file(run_folder)).training.steps
    result = {"steps": steps, "perplexity": 3.5, "ema": {"perplexity": 3.25}}
    run_dir.result_file(run_folder).write_text(json.dumps(result))
    assert main(["one"]) == 0
    assert capsys.readouterr().out == f"one: finished, {steps} steps, perplexity 3.5\n"
    run_dir.result_file(run_folder).write_text(json.dumps(result | {"steps": 40}))
    assert status(run_folder)[0] == "failed", "it was given more steps since"


def test_a_run_that_no_scheduler_knows(run_folder, scheduler):
    state, why = status(run_folder)
    assert state == "not finished"
    assert "no step yet" in why


def lines_of(run_folder, *records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    run_dir.metrics_file(run_folder).write_text(text)


@pytest.mark.parametrize("order", ["41 42", "42 41"])
def test_of_several_jobs_the_one_that_trains_tells(order, run_folder, scheduler):
    first, second = order.split()
    rows = f"{first}|{first}|PENDING|Dependency\n{second}|{second}|RUNNING|None"
    scheduler(squeue=rows)
    run_dir.jobs_file(run_folder).write_text("slurm 41\nslurm 42\nslurm 41\n")
    state, why = status(run_folder)
    assert (state, why.partition(":")[0]) == ("running", f"job {second}")


def test_a_chain_is_followed_to_the_job_that_waits(run_folder, scheduler):
    scheduler(squeue="42|42|PENDING|Priority", sacct="41|FAILED|200:0|n1")
    run_dir.jobs_file(run_folder).write_text("slurm 41\nslurm 42\n")
    assert status(run_folder)[0] == "queued"


def test_a_refused_job_is_told_and_tells_nothing_itself(run_folder, scheduler):
    scheduler(squeue="41|41|RUNNING|None\n42|42|FAILED|NonZeroExitCode")
    run_dir.jobs_file(run_folder).write_text("slurm 41\nslurm 42\nslurm 42 refused\n")
    state, why = status(run_folder)
    assert state == "running"
    assert why.startswith("job 41: refused job 42")


def test_an_allocation_is_the_run_s_job_only_while_it_runs_there(run_folder, scheduler, tmp_path):
    """`--here` failed, and the allocation lives on: nothing may wait for its end, or end it."""
    scheduler(squeue="7|7|RUNNING|None")
    (tmp_path / "scancel").symlink_to(tmp_path / "squeue")
    run_dir.jobs_file(run_folder).write_text("slurm 7 here\n")
    lease = run_dir.lease_folder(run_folder) / "1"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19]
    machine = f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    words = f"slurm 7 0 n1 {os.getpid()} {started} {machine}"
    run_dir.write_whole(lease, f"{words}\n")
    assert status(run_folder)[0] == "running"
    with pytest.raises(UserError, match="on n1 in your allocation 7; Ctrl-C there"):
        cancel(["one"])
    run_dir.write_whole(lease, f"{words} ended\n")
    keep_failure(UserError("too little", "more"), run_folder)
    assert status(run_folder) == ("failed", "too little; more")
    assert follow(run_folder) == 1
    with pytest.raises(UserError, match="no job to cancel: failed, too little"):
        cancel(["one"])


def test_what_is_no_job_in_the_list_is_passed_over(run_folder, scheduler):
    scheduler(squeue="9|9|RUNNING|None")
    run_dir.jobs_file(run_folder).write_text("slurm Welcome to the machine\n\nslurm 9\nhello\n")
    assert status(run_folder)[0] == "running"


def test_a_running_run_comes_with_the_age_of_its_last_step(run_folder, scheduler):
    scheduler(squeue="9|9|RUNNING|None")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    lines_of(run_folder, {"event": "train", "step": 7, "time": time.time() - 130})
    assert "step 7 is the last one written down, 2 min 1" in status(run_folder)[1]


def test_a_running_run_names_the_rank_that_is_slow(run_folder, scheduler):
    scheduler(squeue="9|9|RUNNING|None")
    run_dir.jobs_file(run_folder).write_text("slurm 8\nslurm 9\n")
    for job, rank in (("8", 1), ("9", 2), ("9", 3)):
        fault = Fault("slow", "node", "needs 2 s a step", "n6", rank, step=40, job=job)
        add_fault(run_folder, fault)
    why = status(run_folder)[1]
    assert "slow: rank 3 on n6: step 40: needs 2 s a step" in why
    assert "rank 1" not in why, "that was another job"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("srun: error: n2: task 1: Killed\natoll: something else\n", "n2: task 1: Killed"),
        (
            "Traceback\n  File x\natoll: writing /x failed: No space left on device\n"
            "       free some space\nsrun: error: n1: task 0: Exited with exit code 2\n",
            "writing /x failed: No space left",
        ),
        ("[rank0]: RuntimeError: Timed out waiting 30000ms\nsrun: error: n1\n", "Timed out"),
        ("atoll: the time of job 9 is nearly over\nslurmstepd: error: killed\n", "slurmstepd"),
        ("one\ntwo\n", "two"),
    ],
)
def test_a_failed_job_s_last_words_are_the_reason(output, words, run_folder, scheduler):
    scheduler(sacct="9|FAILED|1:0|n1")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    (run_folder / "slurm-9.out").write_text(output)
    assert words in status(run_folder)[1].partition("its last words: ")[2]


def test_a_run_that_was_not_queued_again_is_not_called_restarted(run_folder, scheduler):
    scheduler(sacct="9|TIMEOUT|0:15|n1")
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    run_dir.restarts_file(run_folder).write_text("{}\n")
    run_dir.restart_file(run_folder).touch()
    run_dir.write_whole(run_dir.checkpoint(run_folder, 20) / "manifest.json", "{}")
    _, why = status(run_folder)
    assert "restarted" not in why and "without time to save" not in why
    assert "step 20 is saved" in why


def test_one_question_for_all_runs(run_folder, scheduler, tmp_path, capsys):
    scheduler(squeue="8|8|RUNNING|None\n9|9|RUNNING|None")
    other = run_folder.with_name("two")
    shutil.copytree(run_folder, other)
    for folder, job in ((run_folder, 8), (other, 9)):
        run_dir.jobs_file(folder).write_text(f"slurm {job}\n")
    log = tmp_path / "log"
    text = (tmp_path / "squeue").read_text()
    (tmp_path / "squeue").write_text(f"{text}echo $* >> {log}\n")
    assert main(["one", "two"]) == 0
    assert capsys.readouterr().out.count(": running, job ") == 2
    assert len(log.read_text().splitlines()) == 1


def test_the_scheduler_is_asked_once_a_minute_then_less(run_folder, scheduler, monkeypatch):
    run_dir.jobs_file(run_folder).write_text("slurm 9\n")
    clock, asked = [1000.0], []

    def pass_time(seconds):
        clock[0] += seconds

    def answers(jobs):
        asked.append(clock[0] - 1000.0)
        ended = clock[0] > 3000
        return {job: Job("failed" if ended else "running", "") for job in jobs}

    monkeypatch.setattr("atoll.cluster.status.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("atoll.cluster.status.time.sleep", pass_time)
    monkeypatch.setattr("atoll.cluster.status.ask", answers)
    assert follow(run_folder) == 1
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert min(pauses) >= 60
    assert max(pauses) <= 302
    assert len(asked) < 12


def test_a_folder_that_is_no_run(here):
    with pytest.raises(UserError, match="no run at nowhere"):
        main(["nowhere"])


LIVE = """
import os, sys, time
from atoll.cluster.lease import _machine, _started
os.mkdir(sys.argv[1] + "/lease")
with open(sys.argv[1] + "/lease/1", "w") as file:
    print("none", 5, 0, "here", os.getpid(), _started(os.getpid()), _machine(), file=file)
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


def test_what_the_guard_did_is_said_of_a_followed_run():
    figures = {"tokens_per_second": 1234.0, "step_seconds": 10.0}
    train = {"event": "train", "step": 2, "loss": None, **figures}
    assert _progress(train, 8).startswith("step      2/8  loss skipped  1,234 tokens/s")
    done = {"event": "guard", "step": 2, "at_step": 2, "kind": "non_finite", "action": "skip"}
    line = _progress(done | {"samples": [8, 16]}, 8)
    assert line == "step      2  non_finite: skip, samples 8 up to 16"


def test_who_asks_often_asks_the_scheduler_once_a_minute(run_folder, scheduler, monkeypatch):
    run_dir.write_whole(run_dir.jobs_file(run_folder), "slurm 9\n")
    clock = itertools.count(1000.0, 20.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    states = []
    monkeypatch.setattr(status_module, "ask", lambda jobs: states.append(1) or {})
    for _ in range(12):
        assert status_module.remembered_status(run_folder)[0] == "unknown"
    # at 1000, then a minute later, then two minutes
    assert len(states) == 3
    run_dir.jobs_file(run_folder).write_text("slurm 9\nslurm 10\n")
    status_module.remembered_status(run_folder)
    assert len(states) == 4  # another job: what was said of the first says nothing of it


def test_a_person_who_submits_a_run_again_counts_anew_and_takes_no_line_back(tmp_path):
    count_anew(tmp_path)
    assert not run_dir.restarts_file(tmp_path).exists()
    add_restart(tmp_path, step=20)
    before = run_dir.restarts_file(tmp_path).read_bytes()
    count_anew(tmp_path)
    assert restarts(tmp_path) == [] and run_dir.restarts_file(tmp_path).read_bytes().startswith(
        before
    )
    add_restart(tmp_path, step=40)
    assert [one["step"] for one in restarts(tmp_path)] == [40]
