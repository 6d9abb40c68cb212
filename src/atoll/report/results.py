"""What came of each run, the best first, under the settings in which the runs differ."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.diff import flat
from atoll.cluster.goodput import effective
from atoll.cluster.status import status
from atoll.errors import UserError
from atoll.proof.accounting import steps_counted
from atoll.report.run import Record, RunMetrics, joules
from atoll.report.tables import Rows, number
from atoll.settings import Run, dumped, load_run

MOST_IN_A_LABEL, LONGEST_VALUE = 4, 40
NO_RESULT = ("event", "step", "time", "targets", "seconds", "tokens")  # of an evaluation's record
# Names and folders differ between any two runs, and what is derived of the number of devices.
NOT_COMPARED = ("name", "folders.", "loggers", "facility.submit")
# Runs that differ in these alone are one job at several sizes.
SIZES = (
    "nodes",
    "ranks_per_node",
    "sharding.",
    "launcher.",
    "training.microbatch_samples",
    "training.global_batch_samples",
)
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class NoSteps:
    """A run that has nothing to draw: queued, failed before its first step, or unreadable."""

    folder: Path
    settings: Run | None
    state: str
    why: str

    @property
    def name(self) -> str:
        return self.folder.name


def without_steps(folder: Path, why: str = "") -> NoSteps:
    """Why a run took no step, as its own files and its scheduler say."""
    try:
        settings = load_run(run_dir.settings_file(folder))
        state, reason = status(folder)
    except UserError as error:
        return NoSteps(folder, None, "failed", why or error.found)
    return NoSteps(folder, settings, state, reason)


def result_rows(runs: Sequence[RunMetrics], others: Sequence[NoSteps]) -> Rows:
    """A row for each run, the lowest held-out loss first; those without a step last."""
    names = labels([*runs, *others])
    ranked = sorted(runs, key=result_key)
    rows = [{"run": names[run.folder], **_result(run), "folder": run.name} for run in ranked]
    failed = [
        {"run": names[run.folder], "state": f"{run.state}: {run.why}", "folder": run.name}
        for run in others
    ]
    every = [*rows, *failed]
    used = {column for row in every for column, cell in row.items() if cell}
    if all(row["run"] == row["folder"] for row in every):
        used.remove("folder")
    return [{column: cell for column, cell in row.items() if column in used} for row in every]


def result_key(run: RunMetrics) -> tuple[float, float]:
    """Its held-out loss, then its last training loss; what is not known comes last."""
    held_out = run.evaluations[-1].get("loss") if run.evaluations else None
    return (_or_last(held_out), _or_last(final_loss(run)))


def final_loss(run: RunMetrics) -> float | None:
    losses: list[float] = [line["loss"] for line in run.train if line["loss"] is not None]
    return losses[-1] if losses else None


def summary_cells(run: RunMetrics) -> dict[str, str]:
    """What the first screen says of a single run: what was run, and what came of it."""
    settings = run.settings
    parameters = run.start.get("parameters")
    sizes = (_count(settings.nodes, "node"), _count(run.devices, "device"))
    what = {
        "model": settings.model.name,
        **({"parameters": _short(parameters)} if parameters else {}),
        "data": settings.data.name,
        "on": ", ".join((settings.facility.name, *sizes)),
        "sharding": settings.sharding.name,
        "steps": f"{run.train[-1]['step']} of {run.newest_start.get('steps', '?')}",
    }
    before = run.evaluations[0].get("loss") if len(run.evaluations) > 1 else None
    result = {name: cell for name, cell in _result(run).items() if name != "devices"}
    if before is not None and "held-out loss" in result:
        result["held-out loss"] = f"{before:.4f} → {result['held-out loss']}"
    return what | {name: cell for name, cell in result.items() if cell}


def _result(run: RunMetrics) -> dict[str, str]:
    last = run.evaluations[-1] if run.evaluations else {}
    figures = {
        f"held-out {name}": f"{x:.4f}" if x < 10 else f"{x:,.4g}"
        for name, x in _figures(last).items()
    }
    known = joules(run)
    energy = known.get("nodes", (sum(value for value, _ in known.values()), ""))[0]
    own = run.train[-1]["step"] - run.settings.checkpoint.initial_step
    of_all = "nodes" in known or steps_counted(run.energy) >= own
    used = [line["mfu"] for line in run.steady if line.get("mfu") is not None]
    seconds = run.seconds
    job_seconds = sum(value for name, value in run.goodput.items() if name != "queue")
    node_hours = (job_seconds or seconds * run.settings.nodes) / 3600
    return {
        **figures,
        "final loss": number(final_loss(run), 4),
        "tokens": f"{run.train[-1]['tokens']:,}",
        "tokens/s": f"{run.tokens_per_second:,.0f}",
        "MFU": f"{statistics.median(used):.1%}" if used else "",
        "minutes": number(seconds / 60, 2),
        "node-hours": f"{node_hours:.3g}",
        "kWh": f"{'' if of_all else '≥ '}{energy / 3.6e6:.3g}" if energy else "",
        "goodput": f"{effective(run.goodput):.1%}" if run.goodput else "",
        "devices": str(run.devices),
        "state": state_of(run),
    }


def state_of(run: RunMetrics) -> str:
    """Finished, or how far it is and why it is no further."""
    state, why = status(run.folder)
    return state if state in ("finished", "running", "queued") else f"{state}: {why}"


def _figures(record: Record) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if name not in NO_RESULT and isinstance(value, int | float)
    }


def labels(runs: Sequence[RunMetrics | NoSteps]) -> dict[Path, str]:
    """Folder -> the settings that set a run apart; its name where those are many or the same."""
    known = {run.folder: compared(run.settings) for run in runs if run.settings is not None}
    names = differing(list(known.values()))
    short = _shortest(names)
    texts = {
        folder: ", ".join(f"{short[name]}={_value(settings.get(name))}" for name in names)
        for folder, settings in known.items()
    }
    are_clear = 0 < len(names) <= MOST_IN_A_LABEL and len(set(texts.values())) == len(texts)
    return {run.folder: (are_clear and texts.get(run.folder)) or run.name for run in runs}


def compared(run: Run) -> dict[str, Any]:
    """A run's settings by dotted name, without those in which any two runs differ."""
    every = flat(dumped(run))
    return {name: value for name, value in every.items() if not name.startswith(NOT_COMPARED)}


def differing(settings: Sequence[Settings]) -> list[str]:
    """The names of the settings that are not the same in all."""
    every = dict.fromkeys(name for each in settings for name in each)
    return [name for name in every if len({json.dumps(each.get(name)) for each in settings}) > 1]


def is_scaling_series(runs: Sequence[RunMetrics]) -> bool:
    """Whether runs are one job on different numbers of devices."""
    names = differing([compared(run.settings) for run in runs])
    same_job = all(name.startswith(SIZES) for name in names)
    return same_job and len({run.devices for run in runs}) > 1


def comparison(a: RunMetrics, b: RunMetrics) -> dict[str, Rows]:
    """What differs between two runs: their settings, and their results with the change."""
    settings = [compared(run.settings) for run in (a, b)]
    results = [_result(run) for run in (a, b)]
    return {
        "Settings that differ": [
            {"setting": name, a.name: _value(settings[0].get(name)), b.name: _value(other)}
            for name in differing(settings)
            for other in [settings[1].get(name)]
        ],
        "Results that differ": [
            {"result": name, a.name: before, b.name: after, "change": _change(before, after)}
            for name in dict.fromkeys([*results[0], *results[1]])
            for before, after in [(results[0].get(name, ""), results[1].get(name, ""))]
            if before != after
        ],
    }


def _change(before: str, after: str) -> str:
    try:
        a, b = (float(text.replace(",", "").rstrip("%")) for text in (before, after))
    except ValueError:
        return ""
    return f"{b / a - 1:+.1%}" if a else ""


def _shortest(names: Sequence[str]) -> dict[str, str]:
    """Each dotted name by as few of its last words as tell it apart."""
    short = {}
    for name in names:
        words = name.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        alone = (end for end in ends if sum(f".{n}".endswith(f".{end}") for n in names) == 1)
        short[name] = next(alone, name)
    return short


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _short(count: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _or_last(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value
