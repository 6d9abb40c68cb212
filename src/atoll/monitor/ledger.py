"""Where the time of a run goes, in `ledger.jsonl`: a line at each start, log line, and end.

Unlike metrics.jsonl it is only added to: what a resume does again stays in it.
"""

import os
import time
from types import TracebackType
from typing import Any

from atoll import run_dir
from atoll.monitor.observers import Observer, StepRecord, WatchedRun

JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID")


class Ledger(Observer):
    """Adds the first rank's seconds in each phase; of other ranks: nothing."""

    def __init__(self, watched: WatchedRun) -> None:
        self.watched = watched
        self.step = watched.resumed_step
        job = next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), "")
        self.add("start", job=job, nodes=watched.run.nodes)

    def after_step(self, update: StepRecord) -> None:
        self.step = update.step
        if update.is_saved or update.step % self.watched.run.training.log_every_steps == 0:
            self.add("steps")

    def on_checkpoint(self, step: int, save_seconds: float, blocked_seconds: float) -> None:
        self.add("checkpoint", saved=step)

    def on_end(self) -> None:
        self.add("steps")

    def close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        calls: TracebackType | None,
    ) -> None:
        """The run ends, after its last evaluation and the export, or by an error."""
        self.add("end", failed=kind is not None)

    def add(self, event: str, **facts: Any) -> None:
        """Write one line."""
        if self.watched.world.rank != 0:
            return
        line = {"event": event, "time": time.time(), "step": self.step, **facts}
        line["seconds"] = self.watched.heartbeat.seconds
        run_dir.append_record(run_dir.ledger_file(self.watched.run_folder), line)
