"""`atoll list`, `logs`, `cancel` and `diff`: what there is, and what becomes of it."""

import json
import shutil
import stat
from pathlib import Path

import pytest
import yaml

from atoll import run_dir
from atoll.cluster import diff, job_control, listing
from atoll.config import compose, stated_folders
from atoll.errors import UserError
from atoll.settings import dumped


@pytest.fixture
def submitted(composed, here):
    """Write the folder of a run that was submitted to Slurm as job 9."""

    def write(name, *overrides):
        run = composed("facility=generic_slurm", f"name={name}", *overrides).run
        folder = run_dir.folder(run)
        run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
        run_dir.write_whole(run_dir.jobs_file(folder), "slurm 9\n")
        return folder

    return write


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stand-ins for a scheduler's programs: what each prints; it keeps the words it was given."""

    def write(**outputs):
        for name, words in outputs.items():
            path = tmp_path / name
            path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\nprintf "%s\\n" "{words}"\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "words"

    return write


@pytest.mark.parametrize("kind", listing.GROUPS)
def test_each_choice_has_a_line(kind, capsys):
    assert listing.main([kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all(row["name"] and row["about"] for row in rows)


def test_runs_are_listed_with_their_step_loss_and_job(submitted, programs, capsys):
    programs(squeue="9|9|RUNNING|None", sacct="")
    folder = submitted("one")
    line = {"event": "train", "step": 3, "loss": 2.5, "time": 0.0}
    run_dir.metrics_file(folder).write_text(json.dumps(line) + "\n")
    assert listing.main([]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "state", "step", "loss", "age", "job", "why"]
    assert row.split()[:4] == ["one", "running", "3", "2.5000"]
    assert listing.main(["jobs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "running"


def test_status_alone_lists_the_runs(submitted, programs, capsys):
    programs(squeue="9|9|RUNNING|None", sacct="")
    submitted("one")
    assert listing.status_of([]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["one", "running"]
    assert listing.status_of(["--json", "one"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["job"] == "9"


def test_runs_are_listed_from_inside_a_clone(submitted, programs, here, monkeypatch, capsys):
    programs(squeue="9|9|RUNNING|None", sacct="")
    submitted("one")
    for file in ("sbatch/train.sbatch", "hydra_conf/run.yaml"):
        (here / file).parent.mkdir()
        (here / file).write_text("")
    monkeypatch.chdir(here / "sbatch")
    assert listing.status_of(["one"]) == 0
    assert capsys.readouterr().out.startswith("one: running")


def own_settings(here, monkeypatch, text):
    file = here / "hydra_conf" / "local" / "default.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setattr(stated_folders, "source_folder", lambda: here)


def test_runs_are_found_where_your_own_settings_put_them(
    submitted, programs, here, tmp_path, monkeypatch, capsys
):
    programs(squeue="9|9|RUNNING|None", sacct="", scancel="")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    text = (
        "folders:\n  runs: ${oc.env:SCRATCH}/runs\n  images: ${oc.env:SCRATCH}/../here/pictures\n"
    )
    own_settings(here, monkeypatch, text)
    submitted("older")
    submitted("one", f"folders.runs={tmp_path}/scratch/runs")
    assert listing.status_of([]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert {row.split()[0] for row in rows} == {"older", "one"}
    assert listing.status_of(["one"]) == 0
    assert job_control.cancel(["one"]) == 0
    assert "of one" in capsys.readouterr().out
    (here / "pictures").mkdir()
    (here / "pictures" / "cpu.sif").write_bytes(b"")
    assert listing.main(["images"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["cpu", "0"]
    missing = f"no run at two, nor in {tmp_path}/scratch/runs or in runs"
    with pytest.raises(UserError, match=missing):
        listing.status_of(["two"])


def test_a_run_is_listed_once_and_found_by_its_folder_whatever_is_stated(
    submitted, programs, here, monkeypatch, capsys
):
    programs(squeue="9|9|RUNNING|None", sacct="")
    folder = submitted("one")
    own_settings(here, monkeypatch, "folders: {runs: runs}\n")
    assert listing.status_of([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (here / "hydra_conf" / "local" / "default.yaml").write_text("folders: {runs: '${x.y}'}\n")
    assert listing.status_of([str(folder)]) == 0


def test_own_folders_may_follow_from_other_settings(tmp_path, monkeypatch):
    tree = tmp_path / "hydra_conf"
    shutil.copytree(compose.config_tree(), tree, ignore=shutil.ignore_patterns("local"))
    (tree / "local").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /facility: lumi\n"
    text += f"folders:\n  runs: {tmp_path}/${{facility.name}}\n"
    (tree / "local" / "default.yaml").write_text(text)
    monkeypatch.setattr(stated_folders, "source_folder", lambda: tmp_path)
    monkeypatch.setattr(compose, "source_folder", lambda: tmp_path)
    assert stated_folders.stated_folder("runs") == tmp_path / "lumi"


@pytest.mark.parametrize("text", ["folders:\n  runs: ${oc.env:NOWHERE_SET}/runs\n", "runs: [\n"])
def test_own_settings_that_cannot_be_read_are_named(text, here, monkeypatch):
    own_settings(here, monkeypatch, text)
    with pytest.raises(UserError, match=r"folders\.runs of .*default\.yaml: .*(NOWHERE_SET|flow)"):
        listing.status_of([])


@pytest.mark.parametrize("text", [b"a: [", b"\xff\xfe\x00", b"- 1", b""])
def test_a_run_that_cannot_be_read_hides_none(text, submitted, programs, capsys):
    programs(squeue="9|9|RUNNING|None", sacct="")
    submitted("one")
    run_dir.settings_file(submitted("two")).write_bytes(text)
    assert listing.status_of([]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "running" in rows["one"] and "unreadable" in rows["two"]
    assert listing.status_of(["two"]) == 2


@pytest.mark.parametrize("closed", ["theirs", "theirs/run.yaml", "theirs/metrics.jsonl"])
def test_a_run_that_somebody_else_keeps_closed_hides_none(
    closed, submitted, programs, capsys, monkeypatch
):
    programs(squeue="9|9|RUNNING|None", sacct="")
    submitted("mine")
    folder = submitted("theirs")
    for name in ("stat", "open"):
        allowed = getattr(Path, name)

        def refuses(path, *words, allowed=allowed, **named):
            if path == folder.parent / closed or folder.parent / closed in path.parents:
                raise PermissionError(13, "Permission denied", str(path))
            return allowed(path, *words, **named)

        monkeypatch.setattr(Path, name, refuses)
    assert listing.status_of([]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "running" in rows["mine"]


def test_an_image_whose_file_was_cleaned_away_is_listed_as_gone(here, monkeypatch, capsys):
    images = here / "images"
    images.mkdir()
    own_settings(here, monkeypatch, f"folders: {{images: {images}}}\n")
    (images / "cpu-1.sif").write_bytes(bytes(2**20))
    (images / "cuda.sif").symlink_to("cuda-2.sif")
    assert listing.main(["images", "--json"]) == 0
    [there, gone] = json.loads(capsys.readouterr().out)
    assert (there["name"], there["MiB"]) == ("cpu-1", "1")
    assert gone == {"name": "cuda", "MiB": "", "built": f"gone: {images / 'cuda-2.sif'}"}


def test_an_empty_folder_has_no_runs(here, capsys):
    assert listing.main([]) == 0
    assert capsys.readouterr().out == "no runs here\n"


def test_a_word_that_names_nothing_to_list(here):
    with pytest.raises(UserError, match="invalid choice: 'facility'"):
        listing.main(["facility"])


def test_logs_prints_the_newest_output(submitted, programs, capsys):
    programs(squeue="", sacct="9|FAILED|1:0|n1")
    folder = submitted("one")
    with pytest.raises(UserError, match="has printed nothing"):
        job_control.logs(["one"])
    (folder / "slurm-9.out").write_text("step 1\nstep 2\n")
    assert job_control.logs(["one"]) == 0
    assert job_control.logs(["one", "--follow"]) == 0  # it has ended
    assert capsys.readouterr().out == "step 1\nstep 2\n" * 2


def test_cancel_ends_the_job_that_lives(submitted, programs, capsys):
    words = programs(squeue="9|9|RUNNING|None", sacct="", scancel="")
    submitted("one")
    assert job_control.cancel(["one"]) == 0
    assert words.read_text().splitlines()[-1] == "9"
    assert "cancelled slurm job 9 of one" in capsys.readouterr().out


def test_a_job_that_nobody_knows_any_more_keeps_no_other_from_its_end(
    submitted, programs, tmp_path, capsys
):
    words = programs(squeue="9|9|RUNNING|None", sacct="")  # no accounting: of 7 nobody knows
    end = f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n[ "$1" != 7 ] || exit 1\n'
    (tmp_path / "scancel").write_text(end)
    (tmp_path / "scancel").chmod(0o755)
    folder = submitted("one")
    run_dir.jobs_file(folder).write_text("slurm 7\nslurm 9\n")
    assert job_control.cancel(["one"]) == 0
    assert words.read_text().splitlines()[-2:] == ["9", "7"]
    assert capsys.readouterr().out.count("cancelled slurm job 9 of one") == 1


def test_nothing_to_cancel_is_said(submitted, programs):
    programs(squeue="", sacct="9|COMPLETED|0:0|n1")
    submitted("one")
    with pytest.raises(UserError, match="run one has no job to cancel: finished"):
        job_control.cancel(["one"])


def test_diff_names_the_settings_that_differ(submitted, capsys):
    submitted("one")
    submitted("two", "optimizer.learning_rate=0.5", "nodes=2")
    assert diff.main(["one", "two"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "nodes: 1 -> 2" in lines and 'name: "one" -> "two"' in lines
    assert any(line.startswith("optimizer.learning_rate: ") for line in lines)
    assert len(lines) == 3


def test_diff_shows_letters_as_they_are(submitted, capsys):
    submitted("one")
    submitted("two", "generation.prompt=Grüße")
    assert diff.main(["one", "two"]) == 0
    assert '-> "Grüße"' in capsys.readouterr().out


def test_diff_of_a_run_that_cannot_be_read_names_its_line(submitted):
    broken = run_dir.settings_file(submitted("one"))
    submitted("two")
    broken.write_text("a: [b\n")
    with pytest.raises(UserError, match=r"one/run.yaml, line 2: not YAML"):
        diff.main(["one", "two"])
