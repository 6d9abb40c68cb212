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
            self.bar = self._bar() if sys.stdout.isatty() else None

    def show(self, record: Record) -> None:
        """Show a record of metrics.jsonl, if it is one of training steps or of the guard."""
        if record["event"] == "guard":
            done = ABOUT_GUARD[record["action"]].format(*record["samples"])
            print(f"step {record['at_step']}: {record['kind']}, {done}", flush=True)
        if record["event"] != "train" or self.started is None:
            return
        step, loss, rate = record["step"], record["loss"], record["tokens_per_second"]
        if self.bar is not None:
            figures = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
            self.bar.update(self.bar.task_ids[0], completed=step, figures=figures)
            return
        seconds_per_step = (time.monotonic() - self.started) / max(1, step - self.first_step)
        minutes, seconds = divmod(int(seconds_per_step * (self.total_steps - step)), 60)
        print(
            f"step {step:>6}/{self.total_steps}  loss {loss:.4f}  "
            f"{rate:,.0f} tokens/s  {minutes}:{seconds:02d} left",
            flush=True,
        )

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
            progress.TimeRemainingColumn(),
        )
        bar.add_task("", total=self.total_steps, completed=self.first_step, figures="")
        bar.start()
        return bar
