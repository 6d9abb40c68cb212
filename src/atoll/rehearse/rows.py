"""What a rehearsal finds: a row for each constraint of the facility."""

from dataclasses import dataclass

PASSED, DIFFERS, UNKNOWN = "passed", "differs", "cannot be known here"


@dataclass(frozen=True)
class Row:
    """One constraint, how it went, and what was seen."""

    state: str
    subject: str
    words: str
