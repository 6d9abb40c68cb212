"""What runs wrote down, and the tables of their report."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.cluster.status import queued_jobs, slurm_energy
from atoll.errors import UserError
from atoll.report.tables import Rows, mebibytes
from atoll.settings import Run, load_run

WARM_UP = 1
EVENTS = ("start", "train", "communication", "evaluation", "energy", "checkpoint")


@dataclass(frozen=True)
class RunMetrics:
    """What a run wrote down."""

    run: Run
    folder: Path
    starts: list[dict[str, Any]]
    train: list[dict[str, Any]]
    communication: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    energy: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]

    @property
    def start(self) -> dict[str, Any]:
        return self.starts[0]

    @property
    def devices(self) -> int:
        return int(self.start["ranks"])

    @property
    def steady(self) -> list[dict[str, Any]]:
        """The lines behind the first, where there are any."""
        return self.train[WARM_UP:] or self.train

    @property
    def tokens_per_second(self) -> float:
        return float(statistics.median(line["tokens_per_second"] for line in self.steady))

    @property
    def step_seconds(self) -> float:
        return statistics.fmean(line["step_seconds"] for line in self.steady)


def read(folder: Path) -> RunMetrics:
    """A run's metrics.

    Raises `UserError` for a run that has taken no step.
    """
    lines = run_dir.metrics(folder)
    events = {kind: [r for r in lines if r["event"] == kind] for kind in EVENTS}
    if not events["start"] or not events["train"]:
        raise UserError(f"run {folder.name} has no steps to report", f"atoll status {folder.name}")
    run = load_run(run_dir.settings_file(folder))
    return RunMetrics(run, folder, *(events[kind] for kind in EVENTS))


def scaling(told: Sequence[RunMetrics]) -> Rows:
    """One line for each run; speed-up is over the one of fewest devices."""
    base = told[0]
    epochs = max(len(epoch_losses(one)) for one in told)
    titles = ["devices", "step s", "tokens/s", "speed-up", "efficiency"]
    titles += [f"loss {number + 1}" for number in range(epochs)]
    rows = []
    for one in told:
        speed_up = one.tokens_per_second / base.tokens_per_second
        cells = [
            str(one.devices),
            f"{one.step_seconds:.3f}",
            f"{one.tokens_per_second:,.0f}",
            f"{speed_up:.2f}",
            f"{speed_up * base.devices / one.devices:.0%}",
            *(f"{loss:.4f}" for loss in epoch_losses(one)),
        ]
        rows.append([one.run.name, *cells])
    return [["run", *titles], *rows]


def epoch_losses(one: RunMetrics) -> list[float]:
    """The mean training loss of each epoch, of the steps that were written down."""
    per_epoch = one.start["training_samples"] / one.run.training.global_batch_samples
    epochs: dict[int, list[float]] = {}
    for line in one.train:
        epochs.setdefault(int((line["step"] - 1) / per_epoch), []).append(line["loss"])
    return [statistics.fmean(losses) for _, losses in sorted(epochs.items())]


def communication(told: Sequence[RunMetrics]) -> Rows:
    """What a rank sent in the step that each run has profiled: expected, observed, MiB."""
    rows = []
    for one in told:
        for seen in one.communication[-1:]:
            expected = sum(seen["expected_bytes"].values())
            parts = ", ".join(f"{k} {mebibytes(v)}" for k, v in seen["expected_bytes"].items())
            share = seen["seconds"] / one.step_seconds
            most = seen["collectives"][0] if seen["collectives"] else None
            rows.append(
                [
                    one.run.name,
                    str(one.run.training.global_batch_samples),
                    mebibytes(expected),
                    mebibytes(seen["wire_bytes"]),
                    f"{seen['wire_bytes'] / expected - 1:+.1%}" if expected else "",
                    f"{share:.0%}",
                    f"{most['collective']} {most['shape']} {most['dtype']}" if most else "",
                    parts,
                ]
            )
    titles = ["run", "batch", "expected", "on wire", "differs", "of step", "largest call", "for"]
    return [titles, *rows] if rows else []


def made_of(told: Sequence[RunMetrics]) -> Rows:
    """What each run was made of: image, lock, code, libraries, data, tokenizer."""
    parts = {one.run.name: one.start.get("made_of", {}) for one in told}
    names = list(dict.fromkeys(name for found in parts.values() for name in found))
    if not names:
        return []
    rows = [[run, *(found.get(name, "") for name in names)] for run, found in parts.items()]
    return [["run", *names], *rows]


def checkpoints(told: Sequence[RunMetrics]) -> Rows:
    """How many, how long until one was whole, and how long training stood still for it."""
    rows = []
    for one in told:
        if not one.checkpoints:
            continue
        saves = [line["save_seconds"] for line in one.checkpoints]
        held = [line["blocked_seconds"] for line in one.checkpoints]
        mean = [f"{statistics.fmean(seconds):.3f}" for seconds in (saves, held)]
        share = f"{sum(held) / sum(saves):.1%}"
        rows.append([one.run.name, str(len(saves)), *mean, share])
    return [["run", "saved", "s to save", "s training stood", "share"], *rows] if rows else []


def energy(told: Sequence[RunMetrics]) -> Rows:
    """Of devices, of processors' packages, of whole nodes as Slurm has it; and how it is known."""
    rows = []
    for one in told:
        for part, (joules, source) in _joules(one).items():
            per_token = joules / one.train[-1]["tokens"]
            rows.append([one.run.name, part, f"{joules / 3.6e6:.4g}", f"{per_token:.3g}", source])
    return [["run", "of", "kWh", "J per token", "how"], *rows] if rows else []


def _joules(one: RunMetrics) -> dict[str, tuple[float, str]]:
    """What is known, over all starts of a run."""
    found = {}
    for part in ("device", "package"):
        known = [line for line in one.energy if line[f"{part}_joules"] is not None]
        sources = sorted({line[f"{part}_source"] for line in known})
        if known:
            joules = sum(line[f"{part}_joules"] for line in known)
            found[f"{part}s"] = (joules, "; ".join(sources))
    nodes = slurm_energy(queued_jobs(one.folder))
    return found | ({"nodes": nodes} if nodes else {})
