"""Run a program, and read the words of a verb: the same way everywhere."""

import argparse
import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from atoll.errors import UserError

MISSING = 127  # as a shell says of a program that is not there
TIMED_OUT = 124  # as timeout(1) says


class Finished(NamedTuple):
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of its errors, else of its output, else its exit code."""
        lines = [line.strip() for line in f"{self.stdout}\n{self.stderr}".splitlines()]
        return next((line for line in reversed(lines) if line), f"exit code {self.returncode}")


def run_command(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    input_text: str | None = None,
) -> Finished:
    """Run a program to its end; one that is missing or too slow ends with a shell's code for it."""
    try:
        done = subprocess.run(
            list(argv),
            env=None if environment is None else dict(environment),
            timeout=timeout_seconds,
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return Finished(TIMED_OUT, "", f"{argv[0]} gave no answer in {timeout_seconds:g} s")
    except OSError as error:
        return Finished(MISSING, "", f"cannot start {argv[0]}: {error.strerror}")
    return Finished(done.returncode, done.stdout, done.stderr)


def close_stdin() -> None:
    """Nobody is asked: a library that would ask reads the end of the file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


class VerbParser(argparse.ArgumentParser):
    """argparse whose complaints are two lines: what was found, and a "did you mean"."""

    def __init__(self, verb: str, about: str | None) -> None:
        super().__init__(
            prog=f"atoll {verb}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}", f"`{self.prog} --help` lists what it takes")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The words of a verb, options and the others in any order.

        Raises `UserError` for an option the verb does not have.
        """
        options = [name for action in self._actions for name in action.option_strings]
        for word in argv:
            option = word.partition("=")[0]
            if option.startswith("--") and option != "--" and option not in options:
                near = difflib.get_close_matches(option, options, n=1)
                choices = f"choose from: {', '.join(sorted(options))}"
                raise UserError(
                    f"unknown option: {option}", f"did you mean {near[0]}?" if near else choices
                )
        return self.parse_intermixed_args(list(argv))
