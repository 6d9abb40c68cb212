"""The command line: each command has its function, and an old name leads to the new one."""

import errno
import importlib.util
import os
import subprocess
import sys

import pytest

from atoll.__main__ import RENAMED, main
from atoll.commands import COMMANDS, GROUPS, JOBS_OWN


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_module(command):
    assert importlib.util.find_spec(COMMANDS[command][0].partition(":")[0])


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_command_is_refused_with_its_new_name(old, new, capsys):
    assert new in COMMANDS and old not in COMMANDS
    assert main([old, "x"]) == 2
    found, hint = capsys.readouterr().err.splitlines()
    assert found == f"atoll: unknown command: {old}"
    assert hint.strip() == f"it is called {new} now"


def test_a_word_that_no_file_could_be_called_is_refused_like_any_other(capsys):
    assert main(["site", "nowhere", "1", "--request", "{" * 5000]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compose", "submit", "status", "doctor", "plan", "evaluate"])
def test_help_shows_usage_and_options(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_what_generate_takes_is_known_without_torch():
    words = "import sys; from atoll.__main__ import main; code = main(['generate'])"
    code = f"{words}; sys.exit(code if 'torch' not in sys.modules else 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the following arguments are required: WHERE" in done.stderr


def test_a_folder_that_is_not_there_to_generate_from(tmp_path, capsys):
    assert main(["generate", str(tmp_path / "nowhere"), "--prompt", "x"]) == 2
    assert f"no such folder: {tmp_path / 'nowhere'}" in capsys.readouterr().err


def test_a_word_that_is_no_command(capsys):
    assert main(["repport"]) == 2
    error = capsys.readouterr().err
    assert "unknown command: repport" in error and "did you mean report?" in error
    assert "launch" not in error and "make-delta" not in error, (
        "what jobs call is for nobody to type"
    )


@pytest.mark.parametrize(
    ("word", "instead"),
    [("--cfg", "atoll compose --cfg …"), ("facility=laptop", "atoll submit facility=laptop …")],
)
def test_a_command_comes_first(capsys, word, instead):
    assert main([word, "job"]) == 2
    found, hint = capsys.readouterr().err.splitlines()
    assert f"{word} is no command" in found and instead in hint


def test_a_pythonpath_that_shadows_yaml_does_not_reach_the_console_script(tmp_path):
    (tmp_path / "yaml.py").write_text("raise RuntimeError('not this one')")
    script = "import sys; from atoll.__main__ import entry; entry()"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", script, "status", str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stderr.startswith(f"atoll: no run at {tmp_path}"), done.stderr


def test_help_groups_what_only_jobs_call(capsys):
    assert main([]) == 0
    typed, _, called = capsys.readouterr().out.partition(JOBS_OWN)
    assert all(f"\n  {name} " in called for name in GROUPS[JOBS_OWN])
    assert all(f"\n  {name} " in typed for name in COMMANDS if name not in GROUPS[JOBS_OWN])
    assert "atoll submit facility=NAME experiment=demo" in called


def test_a_near_command_is_named(capsys):
    assert main(["sumbit"]) == 2
    assert "did you mean submit?" in capsys.readouterr().err


@pytest.fixture
def output(monkeypatch):
    """Have the commands print into a file of this name."""

    def to(file):
        monkeypatch.setattr("sys.stdout", file)

    return to


def test_a_reader_that_has_gone_is_no_traceback(output):
    read, write = os.pipe()
    os.close(read)
    output(os.fdopen(write, "w"))
    assert main(["--help"]) == 1


@pytest.mark.login_node
def test_a_full_disk_behind_the_output_is_two_lines(output, capfd):
    output(os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    assert main(["--help"]) == 2
    found, hint = capfd.readouterr().err.splitlines()
    assert found == "atoll: cannot use what this command prints: No space left on device"
    assert "space" in hint


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/kept/runs"), "cannot use /kept/runs"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "cannot use /x: Read-only"),
        (OSError(errno.EIO, "Input/output error", "/x"), "cannot use /x: Input/output error"),
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), "no numpy, which atoll"),
        (RuntimeError("Could not determine home directory."), "a name that is no user"),
        (ModuleNotFoundError("No module", name="torch.distributed"), "no torch.distributed"),
    ],
)
def test_what_a_person_can_mend_is_two_lines(error, words, monkeypatch, capsys):
    def fails(argv):
        raise error

    monkeypatch.setattr("atoll.cluster.plan.main", fails)
    assert main(["plan"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and words in lines[0]


def test_a_defect_of_our_own_keeps_its_traceback(monkeypatch):
    def fails(argv):
        raise ModuleNotFoundError("No module named 'atoll.nowhere'", name="atoll.nowhere")

    monkeypatch.setattr("atoll.cluster.plan.main", fails)
    with pytest.raises(ModuleNotFoundError):
        main(["plan"])


GOES_ON = ("federate", "atoll: stopped; the same command goes on\n")


@pytest.mark.parametrize(
    ("command", "printed"), [("plan", "atoll: stopped\n"), ("launch", ""), GOES_ON]
)
def test_ctrl_c_is_no_traceback(command, printed, monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("atoll.cluster.plan.main", interrupted)
    monkeypatch.setattr("atoll.launch.main", interrupted)
    monkeypatch.setattr("atoll.campaign.coordinator.main", interrupted)
    assert main([command]) == 130
    assert capsys.readouterr().err == printed


def test_a_locale_of_other_letters_is_no_traceback(tmp_path):
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    plain |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-m", "atoll", "--help"]
    done = subprocess.run(argv, env=plain, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert "COMMAND …" in done.stdout.decode()
