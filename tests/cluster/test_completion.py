"""Completion offers commands, the choices of each group, the settings and the runs of a folder."""

import shutil
import subprocess

import pytest

from atoll.cluster import completion

ASK = 'COMP_WORDBREAKS=" =" COMP_LINE=$1 COMP_POINT=${#1}; _atoll; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("atoll sub", ["submit"]),
        ("atoll laun", [""]),
        ("atoll submit facility=lum", ["lumi"]),
        ("sbatch/train.sbatch model=llama2", ["llama2_7b"]),
        ("atoll compose optimizer.learning_r", ["optimizer.learning_rate="]),
        ("atoll status thi", ["this-run"]),
        ("atoll list fac", ["facilities"]),
    ],
)
def test_bash_completes(typed, offered, tmp_path):
    (tmp_path / "runs" / "this-run").mkdir(parents=True)
    script = f"compopt() {{ :; }}\n{completion.bash()}{ASK}"
    words = ["bash", "-c", script, "bash", typed]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == offered


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_has_a_script_that_it_can_read(shell, capsys, tmp_path):
    assert completion.main([shell]) == 0
    script = capsys.readouterr().out
    assert "facility=laptop" in script and "optimizer.learning_rate=" in script
    assert "@" not in script.replace("@(", "").replace("[@]", "")
    if shutil.which(shell) is not None:  # zsh and fish are not everywhere
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("atoll list fac", ["facilities"]), ("atoll submit facility=leo", ["facility=leonardo"])],
)
def test_fish_completes(typed, offered, tmp_path):
    (tmp_path / "script").write_text(completion.fish())
    words = ["fish", "-c", f"source {tmp_path}/script; complete -C '{typed}'"]
    if shutil.which("fish") is not None:  # it is not everywhere
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split() == offered


def test_every_command_that_takes_runs_is_one():
    assert set(completion.OF_RUNS) < set(completion.commands())
