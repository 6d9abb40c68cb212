"""The one error a person may cause: what was found, and how to mend it."""


class UserError(Exception):
    """A user's mistake, shown as two lines and never as a traceback.

    `found` says what was found, with the numbers; `mend` says how to mend it.
    """

    def __init__(self, found: str, mend: str) -> None:
        super().__init__(found, mend)
        self.found = found
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.found}\n{self.mend}"

    def shown(self) -> str:
        """The two lines for stderr, to be written in one piece: ranks share one pipe."""
        return f"atoll: {self.found}\n       {self.mend}\n"
