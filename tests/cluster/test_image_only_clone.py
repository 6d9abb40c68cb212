"""sbatch/train.sbatch in a clone with an image and no environment: the image says what to run.

A program stands in for Apptainer; it runs the command here, without the image.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from test_batch_file import Clone, only_run

from atoll import run_dir
from atoll.cluster import job_control

APPTAINER = """\
#!/bin/bash
printf '%s\\n' "$*" >> {log}
[[ " $* " != *" image check "* ]] || exit 0  # it looks for what only an image has
until [[ $1 == *.sif ]]; do shift; done
exec "${{@:2}}"
"""
SIF = bytes(32) + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(32)
SLURM = ("facility=generic_slurm", "facility.account=mine", "image=cpu")


@pytest.fixture
def clone(tmp_path):
    clone = Clone(tmp_path)
    shutil.rmtree(clone.root / ".venv")
    texts = {
        "apptainer": APPTAINER.format(log=tmp_path / "apptainer.log"),
        "python3": f"#!/bin/bash\nexport PYTHONPATH={shlex.quote(str(clone.root / 'src'))}\n"
        f'exec {sys.executable} "$@"\n',
    }
    for name, text in texts.items():
        (clone.programs / name).write_text(text)
        (clone.programs / name).chmod(0o755)
    (clone.root / "images").mkdir()
    (clone.root / "images" / "cpu.sif").write_bytes(SIF)
    clone.add_program("sbatch", "4711;a_cluster")
    return clone


def verbs_called(clone: Clone) -> list[str]:
    return [argv[0] for argv in clone.called()]


def test_a_run_takes_place_here_and_its_exit_code_is_ours(clone):
    done = clone.type("facility=laptop", "image=cpu")
    assert done.returncode == 0, done.stderr
    assert verbs_called(clone) == ["tokenize", "launch", "generate"]
    assert str(only_run(clone) / "metrics.jsonl") in done.stdout
    assert "@atoll" not in done.stdout
    assert clone.type("facility=laptop", "image=cpu", LAUNCH_CODE="75").returncode == 75


def test_several_runs_take_turns(clone):
    done = clone.type("--multirun", "facility=laptop", "image=cpu", "seed=1,2,3")
    assert done.returncode == 0, done.stderr
    assert verbs_called(clone) == ["tokenize", "launch", "generate"] * 3
    assert len({argv[-1] for argv in clone.called()}) == 3
    failing = clone.type("-m", "facility=laptop", "image=cpu", "seed=4,5", TOKENIZE_CODE="3")
    assert failing.returncode == 3
    assert verbs_called(clone)[9:] == ["tokenize"]


def test_a_job_is_queued_for_each_combination_and_noted_for_status(clone):
    done = clone.type("--multirun", *SLURM, "nodes=1,2")
    assert done.returncode == 0, done.stderr
    folders = [Path(argv[-1]) for argv in clone.called()]
    assert done.stdout.splitlines() == [f"job 4711: {folder}" for folder in folders]
    assert [run_dir.jobs_file(folder).read_text() for folder in folders] == ["slurm 4711\n"] * 2


def test_the_queued_words_are_those_of_a_dry_run(clone):
    printed = clone.type("--dry-run", *SLURM)
    assert printed.returncode == 0, printed.stderr
    assert clone.type(*SLURM).returncode == 0
    assert clone.called() == [shlex.split(printed.stdout.splitlines()[0])]


@pytest.mark.parametrize("option", ["--dry-run", "--help", "-h", "--sbatch-env"])
def test_what_is_only_to_be_printed_runs_nothing(option, clone):
    for words in ((*SLURM, option), (option, "facility=laptop", "image=cpu")):
        if option == "--sbatch-env" and words[0] == option:
            continue  # there are no exports without Slurm
        done = clone.type(*words)
        assert done.returncode == 0, done.stderr
        is_queued = option == "--dry-run" and words[-1] == option  # then what it takes is said
        assert ("GiB a device" in done.stderr) if is_queued else (done.stderr == "")
        assert done.stdout and "@atoll" not in done.stdout
    assert clone.called() == []
    assert not (clone.root / "runs").exists()


def test_an_error_is_two_lines(clone):
    done = clone.type("facility=laptop", "image=cpu", "sed=3")
    assert done.returncode == 2
    assert done.stderr.startswith("atoll: unknown setting: sed\n")
    assert len(done.stderr.splitlines()) == 2
    assert done.stdout == ""


@pytest.mark.parametrize(
    "value",
    ["$(touch pwned)", "; touch pwned", "a\n@atoll:run\ntouch pwned", r"\x41\n\\ `touch pwned`"],
)
def test_values_of_the_command_line_are_words_and_never_run(value, clone):
    quoted = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    done = clone.type(*SLURM, f"facility.submit.comment={quoted}", f"generation.prompt={quoted}")
    assert done.returncode == 0, done.stderr
    [argv] = clone.called()
    settings = yaml.safe_load((Path(argv[-1]) / "run.yaml").read_text())
    assert f"--comment={settings['facility']['submit']['comment']}" in argv
    assert settings["generation"]["prompt"] == settings["facility"]["submit"]["comment"]
    assert "touch pwned" in settings["generation"]["prompt"]
    assert not list(clone.root.rglob("pwned"))


REFUSED = "sbatch: error: Batch job submission failed: Invalid qos"


def test_a_refused_run_leaves_nothing(clone):
    clone.add_program("sbatch", "")
    done = clone.type(*SLURM, SLURM_SAYS=REFUSED)
    assert done.returncode == 2
    _, found, hint = done.stderr.splitlines()  # behind what the run would take
    assert found == "atoll: sbatch: Batch job submission failed: Invalid qos"
    assert "facility.submit.qos" in hint
    assert list((clone.root / "runs").iterdir()) == []


def test_a_refusal_deletes_nothing_that_was_there_before(clone):
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    assert clone.type("--here", *SLURM, **allocation).returncode == 0
    folder = only_run(clone)
    checkpoint = run_dir.checkpoint(folder, 500)
    checkpoint.mkdir(parents=True)
    assert clone.type(*SLURM, SLURM_SAYS=REFUSED).returncode == 2
    assert checkpoint.is_dir()
    assert run_dir.settings_file(folder).is_file() and run_dir.launch_script(folder).is_file()


def command(clone: Clone, *words: str, **variables: str):
    return clone.type(*words, script=clone.root / "sbatch" / "atoll", **variables)


@pytest.mark.parametrize(
    "words",
    [
        ("compose", "facility=laptop", "image=cpu"),
        ("plan", "facility=laptop", "image=cpu"),
        ("evaluate", "--dry-run", "facility=laptop", "image=cpu"),
        ("report", "--help"),
        ("status", "--help"),
        ("doctor", "--help"),
        ("federate", "--help"),
    ],
)
def test_commands_need_no_environment(words, clone):
    done = command(clone, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert clone.called() == []


def test_a_clone_that_no_bind_can_name_is_refused(clone, tmp_path):
    odd = clone.root.rename(tmp_path / "a,clone")
    clone.root.symlink_to(odd)
    done = command(clone, "compose", "facility=laptop", "image=cpu")
    assert done.returncode == 2 and done.stdout == ""
    found, hint = done.stderr.splitlines()
    assert found.startswith(f"atoll: {clone.root}: a comma, : or ^ in its name")
    assert "another name" in hint


def test_a_folder_that_no_bind_can_name_is_not_bound(clone, tmp_path):
    (tmp_path / "a,b").mkdir()
    done = command(clone, "status", str(tmp_path / "a,b"))
    assert done.stderr.startswith(f"atoll: no run at {tmp_path}/a,b")
    assert "--bind" in (log := (tmp_path / "apptainer.log").read_text())
    assert not any("a,b" in bind for bind in re.findall(r"--bind (\S+)", log))


def test_status_asks_the_machine_s_own_scheduler(clone):
    clone.add_program("squeue", "4711|4711|RUNNING|None")
    clone.add_program("sacct", "")
    assert clone.type(*SLURM).returncode == 0
    done = command(clone, "status", str(only_run(clone)))
    assert done.returncode == 0, done.stderr
    assert ": running, job 4711" in done.stdout
    assert ["squeue", "--noheader"] in [argv[:2] for argv in clone.called()]


def test_status_finds_runs_where_your_own_settings_put_them(clone, tmp_path):
    (tmp_path / "scratch").mkdir()
    own = clone.root / "hydra_conf" / "local" / "default.yaml"
    own.parent.mkdir(exist_ok=True)
    own.write_text("# @package _global_\nfolders:\n  runs: ${oc.env:SCRATCH}/runs\n")
    scratch = {"SCRATCH": str(tmp_path / "scratch")}
    for program in ("squeue", "sacct"):
        clone.add_program(program, "")
    assert clone.type(*SLURM, "name=one", **scratch).returncode == 0
    done = command(clone, "status", "one", **scratch)
    assert done.stdout.startswith("one: "), done.stderr
    asking = (tmp_path / "apptainer.log").read_text().splitlines()[-1]
    assert f"--bind {tmp_path / 'scratch' / 'runs'} " in asking


def test_a_scheduler_that_is_asked_in_vain_keeps_nobody_waiting(clone):
    """How long it would wait is asked for a few seconds; then the job is queued all the same."""
    (clone.programs / "sbatch").rename(clone.programs / "queue")
    slow = '[[ " $* " != *" --test-only "* ]] || exec sleep 6\nexec "${0%/*}/queue" "$@"\n'
    (clone.programs / "sbatch").write_text(f"#!/bin/bash\n{slow}")
    (clone.programs / "sbatch").chmod(0o755)
    done = clone.type(*SLURM)
    assert done.returncode == 0, done.stderr
    assert "job 4711" in done.stdout


def test_every_program_that_a_command_asks_is_this_machine_s(clone):
    script = (clone.root / "sbatch" / "atoll").read_text().replace("\\\n", "")
    bridged = re.search(r"^for program in (.*); do$", script, re.MULTILINE)[1].split()
    facilities = (clone.root / "hydra_conf" / "facility").glob("*.yaml")
    budgets = [yaml.safe_load(file.read_text()).get("budget") or {} for file in facilities]
    asked = {budget["command"][0] for budget in budgets if budget.get("command")}
    assert asked and asked <= set(bridged)
    assert set(job_control.ENDING.values()) <= set(bridged)


def test_folders_elsewhere_are_there_while_an_image_composes(clone, tmp_path):
    elsewhere = tmp_path / "scratch" / "runs"
    (tmp_path / "scratch").mkdir()
    done = clone.type(*SLURM, f"folders.runs={elsewhere}")
    assert done.returncode == 0, done.stderr
    assert elsewhere.is_dir()
    composing = (tmp_path / "apptainer.log").read_text().splitlines()[-1]
    assert f"--bind {tmp_path / 'scratch'} " in composing


def test_the_hubs_caches_are_there_while_an_image_composes(clone, tmp_path):
    """A job has those that are folders where its line was typed."""
    named, scratch, home = tmp_path / "hf", tmp_path / "scratch", tmp_path / "home"
    for folder in (named, scratch, home / ".cache"):
        folder.mkdir(parents=True)
    (home / ".cache" / "huggingface").symlink_to(scratch)
    clone.type("--dry-run", *SLURM, HF_HOME=str(named), HOME=str(home))
    log = (tmp_path / "apptainer.log").read_text()
    assert f"--bind {named} " in log and f"--bind {scratch} " in log


def test_an_environment_that_cannot_start_leaves_it_to_the_image(clone):
    python = clone.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/bash\necho libpython3.11.so: cannot open >&2\nexit 127\n")
    python.chmod(0o755)
    done = clone.type("--dry-run", *SLURM)
    assert done.returncode == 0
    assert "cannot start: libpython3.11.so: cannot open; going on in " in done.stderr
    shutil.rmtree(clone.root / "images")
    done = clone.type("--dry-run", *SLURM)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "libpython3.11.so" in done.stderr and "make setup" in done.stderr


def test_what_a_run_reads_is_there_for_a_command_about_it(clone, tmp_path):
    """Whichever folder of the run is given; tokens and text lie elsewhere."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("words of a text\n")
    (tmp_path / "scratch").mkdir()
    places = (f"folders.runs={tmp_path}/runs", f"folders.prepared={tmp_path}/scratch/prepared")
    text = ("data=text_files", f"data.files={tmp_path}/texts/*.txt")
    assert clone.type(*SLURM, "name=one", *places, *text).returncode == 0
    inside = tmp_path / "runs" / "one" / "checkpoints"
    inside.mkdir()
    command(clone, "generate", str(inside))
    asking = (tmp_path / "apptainer.log").read_text().splitlines()[-1]
    for folder in ("runs/one", "texts", "scratch/prepared"):
        assert f"--bind {tmp_path / folder} " in asking
    mounts = re.findall(r"--bind (\S+)", asking)
    assert len(mounts) == len(set(mounts))
