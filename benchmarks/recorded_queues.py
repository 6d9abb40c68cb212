"""What jobs waited at real facilities, from their logs in the Standard Workload Format.

https://www.cs.huji.ac.il/labs/parallel/workload/swf.html: a line a job, of which the second number
is when it was submitted, the third its wait, both in seconds, and the fifth its processors.
"""

import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# processors of the jobs that a facility's are taken to be, by its place in the list
SIZES = ((4, 8), (9, 16), (17, 32), (33, 10**9))


@dataclass(frozen=True)
class Recorded:
    """A log's jobs of one size, read from `begin` on; after its end it begins again.

    submitted: in seconds from the first one, rising; waited: seconds, of each.
    """

    submitted: Sequence[float]
    waited: Sequence[float]
    begin: float

    @property
    def median_minutes(self) -> float:
        return statistics.median(self.waited) / 60

    def wait_seconds(self, now: float) -> float:
        """What the next job waited that was submitted at this moment, or after it."""
        moment = (self.begin + now) % self.submitted[-1]
        return self.waited[bisect_left(self.submitted, moment)]


def recorded_queue(log: Path, place: int, draws: random.Random) -> Recorded:
    """The queue of the facility at this place, from anywhere in a log on.

    Raises `SystemExit` where the log has no jobs of its size at two moments.
    """
    least, most = SIZES[place % len(SIZES)]
    jobs = sorted(_jobs(log, least, most))
    if len({moment for moment, _ in jobs}) < 2:
        raise SystemExit(f"{log} has {len(jobs)} jobs of {least} processors or more: name another")
    first = jobs[0][0]
    submitted = [moment - first for moment, _ in jobs]
    return Recorded(submitted, [wait for _, wait in jobs], draws.uniform(0, submitted[-1]))


def _jobs(log: Path, least: int, most: int) -> list[tuple[float, float]]:
    """When each was submitted and what it waited; a wait of -1 is not known."""
    jobs = []
    for line in log.read_text(errors="replace").splitlines():
        words = line.split()
        if not words or words[0].startswith(";"):
            continue
        submitted, wait, processors = float(words[1]), float(words[2]), int(float(words[4]))
        if wait >= 0 and least <= processors <= most:
            jobs.append((submitted, wait))
    return jobs
