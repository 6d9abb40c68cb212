"""The one error a person may cause: what was found, and how to fix it."""

from contextlib import suppress
from pathlib import Path

FAILURE = "failure.txt"  # in a run's folder: the mistake that ended its last start


class UserError(Exception):
    """A user's mistake, shown as two lines and never as a traceback.

    `found` says what was found, with the numbers; `hint` says how to fix it.
    """

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.found}\n{self.hint}"

    @property
    def in_a_line(self) -> str:
        """Both, for a journal or a table."""
        return f"{self.found} ({self.hint})" if self.hint else self.found

    def shown(self) -> str:
        """The two lines for stderr, to be written in one piece: ranks share one pipe."""
        return f"atoll: {self.found}\n       {self.hint}\n"


def keep_failure(error: UserError, run_folder: Path) -> None:
    """Write down why a run could not start, for who asks later; a full disk is no second error."""
    with suppress(OSError):
        (run_folder / FAILURE).write_text(f"{error}\n")


def first_line(error: Exception) -> str:
    """What a library's error says first, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def printable(text: str, most: int | None = None) -> str:
    """Text of others as it may be shown: what steers a terminal is escaped, what is long is cut."""
    cut = text if most is None or len(text) <= most else f"{text[:most]} …"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
