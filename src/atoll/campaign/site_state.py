"""Where a facility stands in a round, as the lines of its journal tell."""

from dataclasses import dataclass, field
from typing import Any

AT_WORK = ("queued", "running", "unknown", "ready")  # states of a facility that has taken work
NO_NEWS = ("unreachable", "refused")  # they tell nothing of a job


def has_taken_work(facts: dict[str, Any]) -> bool:
    """Whether an answer says so, or was cut off while the facility was at it."""
    return facts.get("begun") is True or facts.get("state") in AT_WORK


@dataclass
class SiteState:
    """Where a facility stands in a round: what the lines of the journal add up to."""

    has_update: bool
    answer: dict[str, Any] = field(default_factory=dict)  # state, why, and what else it said last
    failures: int = 0
    left_out: dict[str, Any] | None = None  # why, late, asked
    afresh: bool = False  # its late work came to nothing: it is asked for this round's own
    has_job: bool = False  # when it last told of one: it was not done yet
    has_worked: bool = False  # at what it is asked for in this round
    asked: int | None = None  # the round that it was asked for, as it was noted

    @property
    def settled(self) -> bool:
        return self.has_update or self.left_out is not None

    @property
    def text(self) -> str:
        answer = self.answer or {"state": "not asked yet"}
        return ": ".join(str(answer[name]) for name in ("state", "why") if answer.get(name))

    def add(self, event: str, facts: dict[str, Any]) -> None:
        """What one line of the journal changes."""
        if event == "answered":
            self._answered(facts)
        elif event == "wrong":
            self.answer, self.failures = self.answer | facts, self.failures + 1
        elif event == "left out":
            self.left_out = facts
        elif event == "asked":
            self.asked = facts["round"]
        elif event == "afresh":
            self.afresh, self.has_job, self.has_worked = True, False, False
        elif event == "reopened":
            self.failures, self.left_out = 0, None

    def _answered(self, facts: dict[str, Any]) -> None:
        """Who waits or works is well again: errors between two such answers do not add up."""
        self.answer, said = facts, facts["state"]
        has_begun = has_taken_work(facts)
        self.has_worked = self.has_worked or has_begun
        if has_begun or said not in NO_NEWS:
            self.has_job = has_begun and said != "ready"
        if said in ("queued", "running"):
            self.failures = 0
