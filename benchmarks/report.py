"""Put what the benchmarks measured into docs/benchmarks.md and README: `make bench-report`.

    python benchmarks/report.py [--page runs/benchmarks.html]

The newest row of each case against each peer on each machine counts; the page shows every turn of
ours, against the peer's median.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import coordinate_check
import readme_figures
import results

from atoll.report import html, tables
from atoll.report.drawing import Bars, Span
from atoll.run_dir import write_whole

BEGIN, END = "<!-- make bench-report -->\n", "<!-- end of bench -->"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
COLOURS = {"higher is better": 2, "lower is better": 0, "wanted": 1}
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=Path("runs/benchmarks.html"))
    arguments = parser.parse_args()
    machines = by_machine(newest(results.kept()))
    if not machines:
        print("nothing was measured yet\nmake bench", file=sys.stderr)
        return 2
    text = "\n\n".join(f"{title(rows)}\n\n{tables.markdown(table(rows))}" for rows in machines)
    print(text)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    write_whole(PAGE, f"{before}{BEGIN}{text}\n{END}{rest.partition(END)[2]}")
    readme_figures.main()
    coordinate_check.draw()
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.page, page(machines))
    print(f"\nfigures: {arguments.page}")
    return 0


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each case, peer and machine; files grow at their end."""
    keyed = {
        (json.dumps(row["machine"]), row["benchmark"], row["case"], row["peer"]): row
        for row in rows
    }
    return [keyed[key] for key in sorted(keyed)]


def by_machine(rows: Sequence[Row]) -> list[list[Row]]:
    machines = {json.dumps(row["machine"]): row["machine"] for row in rows}
    return [[row for row in rows if row["machine"] == each] for each in machines.values()]


def title(rows: Sequence[Row]) -> str:
    machine, versions = rows[0]["machine"], rows[-1]["versions"]
    days = sorted({row["date"] for row in rows})
    where = f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB"
    where += f", {machine['device']}" if "device" in machine else ""
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    return f"Medians of turns, {when}, on {where}; Python {versions['python']}, {names}."


def table(rows: Sequence[Row]) -> tables.Rows:
    return [
        {
            "benchmark": row["benchmark"],
            "case": row["case"],
            "ours": results.number(row["ours"]),
            "peer": f"{results.number(row['peers'])} ({row['peer']})",
            "unit": row["unit"],
            "ours / peer": f"{results.ratio(row):.3g}",
            "wanted": results.aim(row) + ("" if results.met(row) else " missed"),
        }
        for row in rows
    ]


def page(machines: Sequence[Sequence[Row]]) -> str:
    figures = html.figures([figure(rows) for rows in machines])
    shown = [html.table(title(rows), table(rows)) for rows in machines]
    return html.page("Benchmarks", "Ours over the peer's median; 1 is equal", [figures, *shown])


def figure(rows: Sequence[Row]) -> Bars:
    """Each turn's ratio to the peer's median, and where it should be."""
    spans = []
    for row in rows:
        ratios = [
            (f"{row['better']} is better", turn / row["peers"]) for turn in row["turns"]["ours"]
        ]
        ratios += [("wanted", row["target"])] if row["target"] else []
        spans += [Span(label(row), series, ratio, ratio) for series, ratio in ratios]
    return Bars("Ours / peer", "ratio", spans, COLOURS, log_x=True)


def label(row: Row) -> str:
    return f"{row['case']} / {row['peer']}"


if __name__ == "__main__":
    sys.exit(main())
