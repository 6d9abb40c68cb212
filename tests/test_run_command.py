"""One way to run a program, and one to read a command's words."""

import os
import sys

import pytest

from atoll.commands import MISSING, TIMED_OUT, CommandParser, run_command
from atoll.errors import UserError


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_program_printed_and_how_it_ended():
    done = run_command(python("import sys; print('out'); sys.exit('the end')"))
    assert (done.returncode, done.stdout, done.last_line) == (1, "out\n", "the end")


def test_its_input_and_environment_are_those_given():
    code = "import os, sys; print(sys.stdin.read() + os.environ.get('WORD', 'none'))"
    assert run_command(python(code)).stdout == "none\n"
    given = run_command(python(code), environment={"WORD": "reef"}, input_text="the ")
    assert given.stdout == "the reef\n"


def test_text_is_the_same_bytes_in_every_locale():
    call = "run_command(['cat'], input_text='\\xf6\\u20ac')"
    code = f"from atoll.commands import run_command; print(ascii({call}))"
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    plain |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_command(python(code), environment=plain)
    assert r"stdout='\xf6\u20ac'" in done.stdout, done.last_line


def test_a_silent_failure_is_told_by_its_code():
    assert run_command(python("raise SystemExit(3)")).last_line == "exit code 3"


def test_a_program_that_is_missing_or_too_slow_is_no_exception():
    missing = run_command(["no-such-program"])
    assert missing.returncode == MISSING and "no-such-program" in missing.last_line
    slow = run_command(python("import time; time.sleep(60)"), timeout_seconds=0.2)
    assert slow.returncode == TIMED_OUT and "0.2 s" in slow.last_line


def parser() -> CommandParser:
    command = CommandParser("demo", "What it does.")
    command.add_argument("words", nargs="*")
    command.add_argument("--dry-run", action="store_true")
    return command


def test_options_and_words_come_in_any_order():
    words = parser().read(["a=1", "--dry-run", "~b", "c='-1'"])
    assert words.dry_run and words.words == ["a=1", "~b", "c='-1'"]


@pytest.mark.parametrize(
    ("argv", "hint"), [(["--dry-rum"], "did you mean --dry-run?"), (["--zzz"], "choose from")]
)
def test_an_unknown_option_is_two_lines(argv, hint):
    with pytest.raises(UserError) as error:
        parser().read(argv)
    assert argv[0] in error.value.found and hint in error.value.hint


def test_a_missing_word_is_two_lines():
    command = CommandParser("demo", None)
    command.add_argument("run")
    with pytest.raises(UserError, match="run"):
        command.read([])
