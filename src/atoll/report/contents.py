"""What a report holds, and its page: first what came out, then figures, tables and settings."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll import run_dir
from atoll.campaign.store import CampaignStore, settings_file
from atoll.errors import UserError
from atoll.report import figures, html, scaling
from atoll.report.campaign import campaign_cells, campaign_tables, rounds
from atoll.report.drawing import Figure
from atoll.report.results import (
    NoSteps,
    comparison,
    is_scaling_series,
    labels,
    result_key,
    result_rows,
    summary_cells,
)
from atoll.report.run import RunMetrics, run_tables
from atoll.report.sources import source_rows
from atoll.report.tables import Rows

MOST_SAMPLES = 6  # of several runs, on the page


@dataclass(frozen=True)
class Report:
    """What is printed, and what more the page shows.

    `first`: how many of the tables stand before the figures. `legend`: names of runs or facilities
    and their colours. `settings`: title -> text, whose `marked` lines differ between two runs.
    """

    title: str
    file: Path
    tables: dict[str, Rows]
    first: int
    figures: Sequence[Figure]
    legend: dict[str, int]
    settings: dict[str, str]
    cards: dict[str, str] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    marked: frozenset[str] = frozenset()

    def page(self, is_watched: bool = False) -> str:
        """The whole file."""
        tables = [html.table(title, rows) for title, rows in self.tables.items()]
        texts = [html.folded(title, text, self.marked) for title, text in self.settings.items()]
        sections = [
            *([html.cards(self.cards)] if self.cards else tables[: self.first]),
            *([html.texts("Samples", self.samples)] if self.samples else []),
            *([html.legend(self.legend)] if len(self.legend) > 1 else []),
            html.figures(self.figures),
            *tables[self.first :],
            *texts,
        ]
        about = time.strftime("Written by atoll report on %Y-%m-%d, %H:%M UTC", time.gmtime())
        return html.page(self.title, about, sections, is_watched)


def of_runs(
    runs: Sequence[RunMetrics], others: Sequence[NoSteps] = (), is_compared: bool = False
) -> Report:
    """Of runs, those of fewest devices first, and of those that have no step."""
    first = {"Results": result_rows(runs, others)}
    marked: frozenset[str] = frozenset()
    if is_compared:
        if len(runs) != 2:
            name = others[0].name if others else "one of the two"
            raise UserError(f"{name} has no steps to compare", "atoll status RUN")
        first |= comparison(runs[0], runs[1])
        a, b = (set(_settings_text(run).splitlines()) for run in runs)
        marked = frozenset(a ^ b)
    first = {title: rows for title, rows in first.items() if rows}
    tables: dict[str, Rows] = {"Sources": [row for run in runs for row in source_rows(run)]}
    tables |= run_tables(runs, is_scaling_series(runs))
    rest = {title: rows for title, rows in tables.items() if rows}
    names = labels([*runs, *others])
    ranked = sorted(runs, key=result_key)
    return Report(
        title=_title(runs, others),
        file=runs[0].folder / "report.html",
        tables=first | rest,
        first=len(first),
        figures=[each for each in figures.of_runs(runs) if each.rows()],
        legend=figures.legend(runs) if len(runs) > 1 else {},
        settings={f"Settings of {run.name}": _settings_text(run) for run in runs},
        cards=summary_cells(runs[0]) if len(runs) == 1 and not others else {},
        samples=_samples(runs[0])
        if len(runs) == 1
        else _last_samples([(names[run.folder], run) for run in ranked]),
        marked=marked,
    )


def _title(runs: Sequence[RunMetrics], others: Sequence[NoSteps]) -> str:
    if len(runs) == 1 and not others:
        return f"Report of {runs[0].name}"
    every = [*(run.name for run in runs), *(run.name for run in others)]
    shown = ", ".join(every[:4]) + (" and others" if len(every) > 4 else "")
    return f"Report of {len(every)} runs: {shown}"


def _settings_text(run: RunMetrics) -> str:
    return run_dir.settings_file(run.folder).read_text()


def _samples(run: RunMetrics) -> dict[str, str]:
    """What the model wrote before its training, where that was asked for, and after it."""
    files = {
        "before training": run_dir.untrained_sample_file(run.folder),
        "after training": run_dir.sample_file(run.folder),
    }
    return {name: file.read_text() for name, file in files.items() if file.is_file()}


def _last_samples(runs: Sequence[tuple[str, RunMetrics]]) -> dict[str, str]:
    """Of the best runs what each wrote after its training."""
    files = {name: run_dir.sample_file(run.folder) for name, run in runs[:MOST_SAMPLES]}
    return {name: file.read_text() for name, file in files.items() if file.is_file()}


def of_simulation(file: Path) -> Report:
    """Of how a job scales on paper; the page stands beside the file."""
    simulated = scaling.read(file)
    return Report(
        title=f"Scaling of {simulated['model']} on {simulated['facility']}",
        file=file.with_suffix(".html"),
        tables=scaling.tables(simulated),
        first=0,
        figures=[scaling.figure(simulated)],
        legend={},
        settings={},
    )


def of_campaign(store: CampaignStore) -> Report:
    """Of all rounds that have begun; `UserError` if none has."""
    begun = rounds(store)
    if not begun:
        raise UserError(f"campaign {store.campaign.name} has begun no round", "atoll federate …")
    tables = {title: rows for title, rows in campaign_tables(begun).items() if rows}
    return Report(
        title=f"Report of {store.folder.absolute().name}",
        file=store.folder / "report.html",
        tables=tables,
        first=0,
        figures=[each for each in figures.of_campaign(begun) if each.rows()],
        legend=figures.facility_colours(begun) | {"global": figures.AVERAGE},
        settings={"Settings": settings_file(store.folder).read_text()},
        cards=campaign_cells(store, begun),
    )
