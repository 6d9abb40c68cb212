"""`atoll report RUN … | CAMPAIGN`: how fast, how it scales, what was sent and should have been."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll import run_dir
from atoll.campaign.store import CampaignStore, load_store, settings_file
from atoll.cluster.status import run_folder
from atoll.errors import UserError
from atoll.report import campaign as report_campaign
from atoll.report import figures as report_figures
from atoll.report import html as report_page
from atoll.report import tables
from atoll.report.run import RunMetrics, checkpoints, communication, energy, made_of, read, scaling
from atoll.report.tables import Rows

ABOUT = """Tables of runs (folders, or names in runs/): devices, time, tokens/s, speed-up over
the one of fewest devices, efficiency, loss per epoch; and the bytes a rank sent in a step, expected
from shapes and mesh, observed on the wire and at the collectives. The first line of a run is left
out of all rates: it warms up. Of a campaign (its folder, or its name in campaigns/): what each
facility did in each round, seconds, bytes, losses, weights, and who was left out and why. Beside
them report.html, in the folder of the first: figures that open anywhere, offline."""


def main(argv: list[str]) -> int:
    """Print the tables, and write the figures beside the first run or the campaign."""
    parser = argparse.ArgumentParser(prog="atoll report", description=ABOUT)
    parser.add_argument("names", nargs="+", metavar="RUN|CAMPAIGN")
    style = parser.add_mutually_exclusive_group()
    for name in ("csv", "markdown"):
        style.add_argument(f"--{name}", action="store_const", dest="style", const=name)
    arguments = parser.parse_args(argv)
    written = tables.STYLES[arguments.style or "text"]
    campaign = _campaign(arguments.names)
    if campaign is not None:
        found, drawn, folder = of_campaign(campaign)
    else:
        runs = [read(run_folder(word)) for word in arguments.names]
        found, drawn, folder = of_runs(sorted(runs, key=lambda one: one.devices))
    print("\n\n".join(f"{title}\n{written(rows)}" for title, rows in found.items()))
    if arguments.style is None:
        write(folder, found, drawn)
    return 0


Drawn = Callable[[], Sequence[str]]  # makes the sections of the page that need the library


def of_runs(told: Sequence[RunMetrics]) -> tuple[dict[str, Rows], Drawn, Path]:
    """Titles and tables, what draws the figures, and the folder for them."""
    found = {"Runs": scaling(told)}
    if sent := communication(told):
        found["Sent by a rank in a step, MiB"] = sent
    if saved := checkpoints(told):
        found["Checkpoints"] = saved
    if used := energy(told):
        found["Energy"] = used
    if parts := made_of(told):
        found["Made of"] = parts
    settings = [(f"Settings of {one.run.name}", run_dir.settings_file(one.folder)) for one in told]

    def sections() -> Sequence[str]:
        texts = [report_page.folded(title, path.read_text()) for title, path in settings]
        return [report_page.figures(list(report_figures.of_runs(told))), *texts]

    return found, sections, told[0].folder


def of_campaign(store: CampaignStore) -> tuple[dict[str, Rows], Drawn, Path]:
    """Titles and tables, what draws the figures, and the folder for them."""
    rounds = report_campaign.rounds(store)
    if not rounds:
        raise UserError(f"campaign {store.campaign.name} has begun no round", "atoll federate …")

    def sections() -> Sequence[str]:
        text = settings_file(store.folder).read_text()
        drawn = report_page.figures(list(report_figures.of_campaign(rounds)))
        return [drawn, report_page.folded("Settings", text)]

    found = {"Facilities": report_campaign.parts(rounds), "Rounds": report_campaign.ends(rounds)}
    return found, sections, store.folder


def write(folder: Path, found: dict[str, Rows], drawn: Drawn) -> None:
    """The page, or a line that says how to have it."""
    try:
        figures, *rest = drawn()
    except UserError as error:
        print(f"\nno figures: {error.found}; {error.hint}")
        return
    title = f"Report of {folder.absolute().name}"
    about = time.strftime("Written by atoll report on %Y-%m-%d, %H:%M UTC", time.gmtime())
    shown = [report_page.table(name, rows) for name, rows in found.items()]
    run_dir.write_whole(
        folder / "report.html", report_page.page(title, about, [figures, *shown, *rest])
    )
    print(f"\nfigures: {folder / 'report.html'}")


def _campaign(names: list[str]) -> CampaignStore | None:
    for folder in (Path(names[0]), Path("campaigns") / names[0]):
        if len(names) == 1 and settings_file(folder).is_file():
            return load_store(folder)
    return None
