"""`atoll report RUN … | CAMPAIGN | FILE.json`: what came of it, how fast, how it scales."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll import run_dir
from atoll.campaign.store import CampaignStore, load_store, settings_file
from atoll.cluster.status import run_folder
from atoll.commands import CommandParser
from atoll.errors import UserError
from atoll.report.contents import Report, of_campaign, of_runs, of_simulation
from atoll.report.html import standalone
from atoll.report.results import NoSteps, without_steps
from atoll.report.run import RunMetrics, read
from atoll.report.tables import STYLES, comma_separated
from atoll.report.watch import DEFAULT_PORT, serve

ABOUT = """Tables of runs (folders, or names in folders.runs): losses, tokens/s, time, energy, the
best first, under the settings in which they differ; the bytes a rank sent in a step, expected from
shapes and mesh, observed on the wire and at the collectives; of one job at several sizes, speed-up
and efficiency over the one of fewest devices. The first line of a run is left out of all rates: it
warms up. A run without a step is named with what ended it. Of a campaign (its folder, or its name
in campaigns/): what each facility did in each round, seconds, bytes, losses, weights, and who was
left out and why. Of a file that `atoll plan --simulate --json` printed: scaling on paper. Beside
them report.html, in the folder of the smallest: one file of figures and
tables that opens anywhere, offline."""


def main(argv: list[str]) -> int:
    """Print the tables, and write the page beside the first run or the campaign."""
    parser = CommandParser("report", ABOUT)
    parser.add_argument("names", nargs="+", metavar="RUN|CAMPAIGN|FILE.json")
    style = parser.add_mutually_exclusive_group()
    kept = "write each table, and the values of each figure, as a file in report/ beside the page"
    style.add_argument("--csv", action="store_const", dest="style", const="csv", help=kept)
    for name, about in (("markdown", "tables of Markdown"), ("json", "as one JSON object")):
        style.add_argument(f"--{name}", action="store_const", dest="style", const=name, help=about)
    style.add_argument(
        "--watch", action="store_const", dest="style", const="watch", help="serve the page here"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="of --watch: %(default)s")
    parser.add_argument("--compare", action="store_true", help="mark what differs between two runs")
    arguments = parser.read(argv)
    names, is_compared = arguments.names, arguments.compare
    if is_compared and len(names) != 2:
        raise UserError(f"--compare is given {len(names)} runs", "name two of them")
    if arguments.style == "watch":
        return serve(lambda: report_of(names, is_compared).page(is_watched=True), arguments.port)
    report = report_of(names, is_compared)
    if arguments.style == "json":
        print(json.dumps(report.tables, indent=1, ensure_ascii=False))
    elif arguments.style == "csv":
        _write_csv(report)
    else:
        written = STYLES[arguments.style or "text"]
        print("\n\n".join(f"{title}\n{written(rows)}" for title, rows in report.tables.items()))
    if arguments.style is None:
        run_dir.write_whole(report.file, report.page())
        print(f"\nfigures: {report.file}")
        if _is_simulation(names):
            run_dir.write_whole(report.file.with_suffix(".svg"), standalone(report.figures[0]))
            print(f"figure alone: {report.file.with_suffix('.svg')}")
    return 0


def _is_simulation(names: Sequence[str]) -> bool:
    return len(names) == 1 and names[0].endswith(".json")


def report_of(names: Sequence[str], is_compared: bool = False) -> Report:
    """The report of runs or of a campaign, as they stand now.

    Raises `UserError` where there is none, and where none of the runs has taken a step.
    """
    if _is_simulation(names):
        return of_simulation(Path(names[0]))
    store = _campaign(names)
    if store is not None:
        return of_campaign(store)
    runs, others = _runs(names)
    return of_runs(sorted(runs, key=lambda run: run.devices), others, is_compared)


def _runs(names: Sequence[str]) -> tuple[list[RunMetrics], list[NoSteps]]:
    """Those that have taken a step, and those that have not; what is no run is left out."""
    runs: list[RunMetrics] = []
    others: list[NoSteps] = []
    for name in names:
        try:
            folder = run_folder(name)
        except UserError as error:
            if len(names) == 1:
                raise
            print(f"left out: {error.found}", file=sys.stderr)
            continue
        try:
            runs.append(read(folder))
        except (UserError, ValueError) as error:
            if len(names) == 1:
                raise
            others.append(without_steps(folder, str(error)))
    if not runs:
        states = ", ".join(f"{run.name} ({run.state})" for run in others)
        why = f"none of these runs has steps to report: {states or 'no run is there'}"
        raise UserError(why, "atoll status RUN says why of each")
    return runs, others


def _write_csv(report: Report) -> None:
    """One tidy file for each table: numbers bare, shares between 0 and 1."""
    folder = report.file.parent / "report"
    values = {f"figure {each.title}": each.rows() for each in report.figures}
    for title, rows in (report.tables | values).items():
        words = "".join(c if c.isalnum() else " " for c in title.lower()).split()
        file = folder / f"{'-'.join(words)}.csv"
        run_dir.write_whole(file, comma_separated(rows) + "\n")
        print(file)


def _campaign(names: Sequence[str]) -> CampaignStore | None:
    for folder in (Path(names[0]), Path("campaigns") / names[0]):
        if len(names) == 1 and settings_file(folder).is_file():
            return load_store(folder)
    return None
