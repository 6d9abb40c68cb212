"""`--then`: what follows a run waits for its end, wherever the run goes on meanwhile."""

import json
import stat
import subprocess

import pytest
import yaml

from atoll import run_dir
from atoll.cluster import job_control, listing, submit, then
from atoll.cluster.job_script import NODE_FILE, then_head
from atoll.errors import UserError
from atoll.settings import dumped

SLURM = ["facility=generic_slurm", "image=none", "name=x", "nodes=2", "facility.node.devices=2"]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stand-ins for a scheduler's programs: what each prints; they keep their words."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(**outputs):
        for name, words in outputs.items():
            path = tmp_path / name
            log = f'echo {name} "$@" >> {tmp_path}/words'
            path.write_text(f'#!/bin/sh\n{log}\nprintf "%s\\n" "{words}"\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "words"

    return write


@pytest.fixture
def queued(composed, here):
    """The folder of a run of Slurm's job 9, and its then.sh."""

    def write(*overrides, steps=("evaluate",), tasks="piqa"):
        run = composed(*SLURM, *overrides).run
        folder = run_dir.folder(run)
        run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
        run_dir.write_whole(run_dir.jobs_file(folder), "slurm 9\n")
        run = then.scored(run, steps, tasks)
        text = then.script(run, folder, steps, then_head(run, folder))
        run_dir.write_whole(run_dir.then_script(folder), text)
        return run, folder

    return write


def test_a_job_that_was_refused_is_not_what_it_waits_for(queued, programs):
    """Typed by hand beside the chain: 13 trains, 12 was told that 13 holds the run."""
    log = programs(squeue="RUNNING", sbatch="Submitted batch job 14")
    _, folder = queued()
    run_dir.jobs_file(folder).write_text("slurm 11\nslurm 13\nslurm 12\nslurm 12 refused\n")
    script = ["bash", str(run_dir.then_script(folder))]
    done = subprocess.run(script, capture_output=True, text=True)
    assert "--jobs=13" in log.read_text(), done.stderr
    assert "the run goes on in job 13" in done.stdout


def test_behind_a_run_of_pbs_containers_see_the_node_file(composed, tmp_path, here):
    run = composed("facility=polaris", "facility.account=a", "name=x").run
    copy = NODE_FILE.format(file=tmp_path / "then_nodes.txt")
    assert copy in then_head(run, tmp_path)
    (tmp_path / "spool").write_text("x1\nx2\n")
    done = subprocess.run(
        ["bash", "-c", f'{copy}echo "$PBS_NODEFILE"; cat "$PBS_NODEFILE"'],
        env={"PATH": "/usr/bin:/bin", "PBS_NODEFILE": str(tmp_path / "spool")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "then_nodes.txt"), "x1", "x2"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--then", "evaluate,repot"], "repot is no step that follows a run"),
        (["--then", "report,"], "nothing is no step"),
        (["--then", "evaluate"], "no task is named"),
        (["--then", "report", "--tasks", "piqa"], "--tasks piqa, and nothing scores them"),
        (["--tasks", "piqa"], "--tasks piqa, and nothing scores them"),
        (["--then", "evaluate", "--tasks=piqa", "training.steps=0"], "this run makes none"),
    ],
)
def test_what_cannot_follow_is_refused_before_anything_is_written(words, found, here):
    with pytest.raises(UserError, match=found):
        submit.main(["facility=laptop", "name=x", *words])
    assert not (here / "runs").exists()


def test_a_run_and_what_follows_it_are_queued_once(programs, here, capsys):
    log = programs(sbatch="4711;cluster", squeue="4711|4711|PENDING|Dependency", sacct="")
    line = [*SLURM, "--then", "evaluate,report", "--tasks", "piqa,arc_easy"]
    assert submit.main(line) == 0
    train, behind = [text for text in log.read_text().splitlines() if "--test-only" not in text]
    assert "--dependency=singleton" in train and train.endswith("/runs/x")
    assert "--dependency=afterany:4711" in behind and "--job-name=x-then" in behind
    assert "--signal" not in behind and behind.endswith("/runs/x/then.sh")
    folder = here / "runs" / "x"
    assert run_dir.jobs_file(folder).read_text() == "slurm 4711\n"
    assert then.then_jobs(folder) == [("slurm", "4711")]
    script = run_dir.then_script(folder).read_text().splitlines()
    assert "scores --tasks=piqa,arc_easy" in script[-2] and "--ntasks=4" in script[-2]
    assert script[-1].endswith(f"-m atoll report {folder}")
    assert "job 4711: waits for the end of x" in capsys.readouterr().out
    assert submit.main(line) == 0
    assert "waits already for the end of x" in capsys.readouterr().out
    assert [text for text in log.read_text().splitlines() if "afterany" in text] == [behind]


def test_a_dry_run_shows_both(here, capsys):
    assert submit.main([*SLURM, "--then", "report", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "--dependency=afterany:JOB" in text and "then.sh\n#!/bin/bash" in text
    assert not (here / "runs").exists()


def ran(folder):
    script = run_dir.then_script(folder)
    return subprocess.run(["bash", script], capture_output=True, text=True, timeout=30)


def test_it_begins_when_the_run_has_ended(queued, programs):
    log = programs(srun="scores", squeue="")
    _, folder = queued()
    run_dir.result_file(folder).write_text("{}")
    assert ran(folder).returncode == 0
    [line] = log.read_text().splitlines()
    assert line.startswith("srun --nodes=2 --ntasks=4") and "scores --tasks=piqa" in line


def test_it_waits_behind_the_job_in_which_the_run_goes_on(queued, programs):
    log = programs(srun="scores", squeue="PENDING", sbatch="Welcome\n12;cluster")
    _, folder = queued()
    run_dir.jobs_file(folder).write_text("slurm 9\nslurm 11\nslurm 10 refused\n")
    done = ran(folder)
    assert done.returncode == 0, done.stderr
    squeue, sbatch = log.read_text().splitlines()
    assert "--jobs=11" in squeue and "--dependency=afterany:11" in sbatch
    assert sbatch.endswith("then.sh")
    assert then.then_jobs(folder) == [("slurm", "12")]


def test_a_run_that_failed_is_followed_by_nothing(queued, programs):
    log = programs(srun="scores", squeue="FAILED", sbatch="12")
    _, folder = queued()
    done = ran(folder)
    assert done.returncode == 1
    assert done.stderr.startswith("atoll: the run has not come to its end: atoll status ")
    assert len(done.stderr.splitlines()) == 2
    assert "srun" not in log.read_text() and "sbatch" not in log.read_text()


def test_status_tells_of_it_and_cancel_ends_it(queued, programs, capsys):
    log = programs(squeue="9|9|RUNNING|None\n12|12|PENDING|Dependency", sacct="", scancel="")
    _, folder = queued()
    run_dir.then_jobs_file(folder).write_text("slurm 12\n")
    assert listing.status_of(["x"]) == 0
    assert "x, what follows it: job 12: queued, waits for Dependency" in capsys.readouterr().out
    assert job_control.cancel(["x"]) == 0
    cancelled = [text for text in log.read_text().splitlines() if text.startswith("scancel")]
    assert cancelled == ["scancel 9", "scancel 12"]


def test_pbs_has_its_own_words(composed):
    run = composed("facility=testbed_pbs", "name=x").run
    words = then.BEHIND["pbs"](run, run_dir.folder(run), run_dir.folder(run) / "then.sh", "7.pbs")
    assert words[:3] == ["qsub", "-W", "depend=afterany:7.pbs"]
    assert words[words.index("-N") + 1] == "x-then"
    assert words[-3:] == ["--", "/bin/bash", str(run_dir.folder(run) / "then.sh")]
    assert any(word.endswith("/then.out") for word in words)


def test_tasks_that_the_bundle_lacks_are_refused(composed, tmp_path):
    run = composed(*SLURM).run
    folders = run.folders.model_copy(update={"bundle": tmp_path})
    run_dir.bundle_manifest(tmp_path).write_text(json.dumps({"tasks": ["piqa"]}))
    bundled = run.model_copy(update={"folders": folders})
    assert then.scored(bundled, ["evaluate"], "piqa").evaluation.tasks == ["piqa"]
    with pytest.raises(UserError, match="holds the data of piqa, this run is scored with boolq"):
        then.scored(bundled, ["evaluate"], "boolq")
