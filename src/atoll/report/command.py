"""`atoll report RUN … | CAMPAIGN`: how fast, how it scales, what was sent and should have been."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.store import CampaignStore, load_store, settings_file
from atoll.cluster.status import run_folder
from atoll.commands import VerbParser
from atoll.errors import UserError
from atoll.report import figures, html
from atoll.report.campaign import campaign_tables, rounds
from atoll.report.run import RunMetrics, read, run_tables
from atoll.report.tables import STYLES, Rows

ABOUT = """Tables of runs (folders, or names in runs/): devices, time, tokens/s, speed-up over
the one of fewest devices, efficiency, loss per epoch; and the bytes a rank sent in a step, expected
from shapes and mesh, observed on the wire and at the collectives. The first line of a run is left
out of all rates: it warms up. Of a campaign (its folder, or its name in campaigns/): what each
facility did in each round, seconds, bytes, losses, weights, and who was left out and why. Beside
them report.html, in the folder of the first: figures that open anywhere, offline."""


@dataclass(frozen=True)
class Report:
    """What is printed, and what more the page in `folder` shows."""

    folder: Path
    tables: dict[str, Rows]
    figures: Callable[[], Iterable[Any]]  # made for the page alone: they need plotly
    settings: dict[str, Path]  # title -> file


def main(argv: list[str]) -> int:
    """Print the tables, and write the figures beside the first run or the campaign."""
    parser = VerbParser("report", ABOUT)
    parser.add_argument("names", nargs="+", metavar="RUN|CAMPAIGN")
    style = parser.add_mutually_exclusive_group()
    for name in ("csv", "markdown", "json"):
        style.add_argument(f"--{name}", action="store_const", dest="style", const=name)
    arguments = parser.read(argv)
    store = _campaign(arguments.names)
    if store is None:
        runs = [read(run_folder(name)) for name in arguments.names]
        report = of_runs(sorted(runs, key=lambda run: run.devices))
    else:
        report = of_campaign(store)
    if arguments.style == "json":
        print(json.dumps(report.tables, indent=1, ensure_ascii=False))
        return 0
    written = STYLES[arguments.style or "text"]
    print("\n\n".join(f"{title}\n{written(rows)}" for title, rows in report.tables.items()))
    if arguments.style is None:
        _write_page(report)
    return 0


def of_runs(runs: Sequence[RunMetrics]) -> Report:
    """Of runs, those of fewest devices first."""
    tables = {title: rows for title, rows in run_tables(runs).items() if rows}
    settings = {f"Settings of {run.name}": run_dir.settings_file(run.folder) for run in runs}
    return Report(runs[0].folder, tables, lambda: figures.of_runs(runs), settings)


def of_campaign(store: CampaignStore) -> Report:
    """Of all rounds that have begun; `UserError` if none has."""
    begun = rounds(store)
    if not begun:
        raise UserError(f"campaign {store.campaign.name} has begun no round", "atoll federate …")
    settings = {"Settings": settings_file(store.folder)}
    tables = {title: rows for title, rows in campaign_tables(begun).items() if rows}
    return Report(store.folder, tables, lambda: figures.of_campaign(begun), settings)


def _write_page(report: Report) -> None:
    """The page, or a line that says how to have it."""
    try:
        drawn = html.figures(report.figures())
    except UserError as error:
        print(f"\nno figures: {error.found}; {error.hint}")
        return
    tables = [html.table(title, rows) for title, rows in report.tables.items()]
    texts = [html.folded(title, path.read_text()) for title, path in report.settings.items()]
    about = time.strftime("Written by atoll report on %Y-%m-%d, %H:%M UTC", time.gmtime())
    page = html.page(f"Report of {report.folder.absolute().name}", about, [drawn, *tables, *texts])
    file = report.folder / "report.html"
    run_dir.write_whole(file, page)
    print(f"\nfigures: {file}")


def _campaign(names: Sequence[str]) -> CampaignStore | None:
    for folder in (Path(names[0]), Path("campaigns") / names[0]):
        if len(names) == 1 and settings_file(folder).is_file():
            return load_store(folder)
    return None
