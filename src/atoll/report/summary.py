"""`atoll summary RUN`: the report's page, and one box with what a finished run made."""

import io
from contextlib import redirect_stdout, suppress
from pathlib import Path

from atoll.cluster.summary import summary
from atoll.commands import CommandParser
from atoll.errors import UserError
from atoll.report import command

ABOUT = "Write a run's report.html, and print in one box what the run made."


def main(argv: list[str]) -> int:
    """Print the box of one run."""
    parser = CommandParser("summary", ABOUT)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    folder = parser.read(argv).run_folder
    with suppress(UserError), redirect_stdout(io.StringIO()):  # an evaluation has no steps
        command.main([str(folder)])
    print(summary(folder))
    return 0
