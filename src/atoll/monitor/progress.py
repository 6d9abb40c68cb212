"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from atoll.monitor.observers import Observer, Record

ABOUT_GUARD = {
    "skip": "samples {} up to {} are skipped",
    "roll_back": "back to the last checkpoint, samples {} up to {} are jumped over",
}


class Progress(Observer):
    """Shows each record of steps with the time that is left, and each evaluation."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self.total_steps, self.first_step = total_steps, first_step
        self.started: float | None = None
        self.bar: Any = None

    def before_step(self, step: int) -> None:
        if self.started is None:
            self.started = time.monotonic()

    def show(self, record: Record) -> None:
        """Show a record of metrics.jsonl, if it is one of training steps or of the guard."""
        if record["event"] == "guard":
            done = ABOUT_GUARD[record["action"]].format(*record["samples"])
            print(f"step {record['at_step']}: {record['kind']}, {done}", flush=True)
        if record["event"] != "train" or self.started is None:
            return
        step, figures = record["step"], self._figures(record, time.monotonic() - self.started)
        if not sys.stdout.isatty():
            print(f"step {step:>6}/{self.total_steps}  {figures}", flush=True)
            return
        if self.bar is None:  # not before: there is nothing to show yet
            self.bar = self._bar()
        self.bar.update(self.bar.task_ids[0], completed=step, figures=figures)
        self.bar.start()

    def _figures(self, record: Record, seconds_so_far: float) -> str:
        step, loss, rate = record["step"], record["loss"], record["tokens_per_second"]
        seconds_per_step = seconds_so_far / max(1, step - self.first_step)
        minutes, seconds = divmod(int(seconds_per_step * (self.total_steps - step)), 60)
        return f"loss {loss:.4f}  {rate:,.0f} tokens/s  {minutes}:{seconds:02d} left"

    def on_evaluation(self, step: int, figures: dict[str, float], seconds: float) -> None:
        names = [name for name in figures if name not in ("loss", "targets")]
        shown = ", ".join(f"{name} {figures[name]:.4g}" for name in names)
        print(f"step {step}: held-out {shown} (loss {figures['loss']:.4f})", flush=True)

    def on_end(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _bar(self) -> Any:
        from rich import progress

        bar = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[figures]}"),
        )
        bar.add_task("", total=self.total_steps, completed=self.first_step, figures="")
        return bar
