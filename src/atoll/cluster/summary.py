"""What a finished run made, in one box: losses before and after, speed, and where everything is."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.config.identity import FREE
from atoll.config.provenance import leaves
from atoll.settings import Run, dumped, load_run

BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 40
SAMPLE_LINES, SAMPLE_WIDTH = 12, 38
# settings of jobs and of what watches them: a run is the same with others
OF_JOBS = (
    *FREE,
    *("facility.account", "facility.walltime_minutes"),
    *("confirm.", "monitor.", "override.", "restart.", "watch."),
)
NO_FIGURES = ("step", "time", "targets", "seconds")  # of an evaluation's record


def is_finished(run: Run) -> bool:
    """Whether this very run has trained, exported and sampled, so that nothing is left to do."""
    folder = run_dir.folder(run)
    if writes_text(run) and not run_dir.sample_file(folder).exists():
        return False
    return has_exported(run) and dumped(load_run(run_dir.settings_file(folder))) == dumped(run)


def has_exported(run: Run) -> bool:
    """Whether this run has trained and exported, by settings that differ in no more than `OF_JOBS`.

    Then a job of it makes no other model, and what states how that was made is to stay as it is.
    """
    folder = run_dir.folder(run)
    made = [run_dir.settings_file(folder), run_dir.export(folder)]
    if run.training.steps == 0 or not all(path.exists() for path in made):
        return False
    if result_of(run, folder) is None:
        return False
    before, now = (dict(leaves(dumped(x))) for x in (load_run(made[0]), run))
    changed = {name for name in before.keys() | now if before.get(name) != now.get(name)}
    return all(name in OF_JOBS or name.startswith(OF_JOBS) for name in changed)


def result_of(run: Run, folder: Path) -> dict[str, Any] | None:
    """What a run came to; nothing where it has none yet, or that of fewer steps it had before."""
    file = run_dir.result_file(folder)
    result: dict[str, Any] | None = json.loads(file.read_text()) if file.is_file() else None
    if result is None or run.training.steps not in (None, result["steps"]):
        return None
    return result


def writes_text(run: Run) -> bool:
    """Whether a run ends with a sample."""
    has_prompt = run.generation.prompt is not None
    return has_prompt and run.task.name != "classification" and run.training.steps != 0


def summary(run_folder: Path) -> str:
    """The box, as text."""
    records = run_dir.metrics(run_folder)
    train = [record for record in records if record["event"] == "train"]
    rows = [*_evaluations(records), *_training(train), *_places(run_folder)]
    width = max((len(label) for label, _ in rows), default=0)
    lines = [f"{label:{width}}  {text}" for label, text in rows]
    return boxed(run_folder.name, [*lines, *_samples(run_folder)])


def boxed(title: str, lines: Sequence[str]) -> str:
    """Lines within a frame that is as wide as the longest of them."""
    width = max(len(title) + 2, *(len(line) for line in lines), 1)
    head = f"╭─ {title} {'─' * (width - len(title) - 1)}╮"
    return "\n".join([head, *(f"│ {line:{width}} │" for line in lines), f"╰{'─' * (width + 2)}╯"])


def _samples(run_folder: Path) -> list[str]:
    """What the model wrote before its training beside what it writes now, where both are there."""
    files = (run_dir.untrained_sample_file(run_folder), run_dir.sample_file(run_folder))
    if not all(file.is_file() for file in files):
        return []
    before, after = ([*_cut(file.read_text())] for file in files)
    pairs = zip_longest(["before training", *before], ["after training", *after], fillvalue="")
    return ["", *(f"{left:{SAMPLE_WIDTH}}  │ {right}".rstrip() for left, right in pairs)]


def _cut(text: str) -> Iterator[str]:
    """Its first lines, each as wide as half a box."""
    lines = [line.expandtabs(4) for line in text.splitlines() if line.strip()]
    for line in lines[:SAMPLE_LINES]:
        plain = "".join(letter if letter.isprintable() else "?" for letter in line)
        yield plain if len(plain) <= SAMPLE_WIDTH else f"{plain[: SAMPLE_WIDTH - 1]}…"


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of bars, the lowest and the highest at the ends of the scale."""
    count = min(MOST_BARS, len(values))
    edges = [round(at * len(values) / count) for at in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _evaluations(records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    held_out = [record for record in records if record["event"] == "evaluation"]
    if not held_out:
        return
    first, last = held_out[0], held_out[-1]
    for name, value in last.items():
        if name in NO_FIGURES or not isinstance(value, float) or name not in first:
            continue
        change = f"{first[name]:,.4g} → {value:,.4g}" if first is not last else f"{value:,.4g}"
        yield f"held-out {name}", change


def _training(train: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    losses = [record["loss"] for record in train if record["loss"] is not None]
    if not losses:
        return
    yield "training loss", f"{losses[0]:.4g} {sparkline(losses)} {losses[-1]:.4g}"
    rates = sorted(record["tokens_per_second"] for record in train)
    yield "speed", f"{rates[len(rates) // 2]:,.0f} tokens/s over {train[-1]['step']} steps"


def _places(run_folder: Path) -> Iterator[tuple[str, str]]:
    run, page = load_run(run_dir.settings_file(run_folder)), run_folder / "report.html"
    yield "metrics", str(run_dir.metrics_file(run_folder))
    if run.training.steps != 0:
        yield "checkpoints", str(run_dir.checkpoints(run_folder))
        yield "export", str(run_dir.export(run_folder))
    if writes_text(run):
        yield "sample", str(run_dir.sample_file(run_folder))
    if page.is_file():
        yield "report", str(page)
