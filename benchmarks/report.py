"""Draw what the benchmarks found, and put the table into the README: `make bench-report`.

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

import results

from atoll.report import html as report_page
from atoll.report import tables
from atoll.run_dir import write_whole

BEGIN, END = "<!-- make bench-report -->\n", "<!-- end of bench -->"
README = Path(__file__).resolve().parents[1] / "README.md"
TITLES = ["benchmark", "case", "ours", "peer", "unit", "ours / peer", "wanted"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=Path("runs/benchmarks.html"))
    arguments = parser.parse_args()
    found = by_machine(newest(kept()))
    if not found:
        print("nothing was measured yet\nmake bench", file=sys.stderr)
        return 2
    text = "\n\n".join(f"{title(rows)}\n\n{tables.markdown(table(rows))}" for rows in found)
    print(text)
    before, _, rest = README.read_text().partition(BEGIN)
    write_whole(README, f"{before}{BEGIN}{text}\n{END}{rest.partition(END)[2]}")
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.page, page(found))
    print(f"\nfigures: {arguments.page}")
    return 0


def kept() -> Iterable[dict[str, Any]]:
    for path in sorted(results.FOLDER.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each case, peer and machine; files grow at their end."""
    found = {}
    for one in rows:
        key = (json.dumps(one["machine"]), one["benchmark"], one["case"], one["peer"])
        found[key] = one
    return [found[key] for key in sorted(found)]


def by_machine(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    machines = {json.dumps(one["machine"]): one["machine"] for one in rows}
    return [[one for one in rows if one["machine"] == each] for each in machines.values()]


def title(rows: Sequence[dict[str, Any]]) -> str:
    machine, versions = rows[0]["machine"], rows[-1]["versions"]
    days = sorted({one["date"] for one in rows})
    where = f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB"
    where += f", {machine['device']}" if "device" in machine else ""
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    return f"Medians of turns, {when}, on {where}; Python {versions['python']}, {names}."


def table(rows: Sequence[dict[str, Any]]) -> tables.Rows:
    lines = []
    for one in rows:
        wanted = results.aim(one) + ("" if results.met(one) else " missed")
        numbers = [results.number(one["ours"]), f"{results.number(one['peers'])} ({one['peer']})"]
        name = one["benchmark"]
        lines.append(
            [name, one["case"], *numbers, one["unit"], f"{results.ratio(one):.3g}", wanted]
        )
    return [TITLES, *lines]


def page(found: Sequence[Sequence[dict[str, Any]]]) -> str:
    figures = report_page.figures([figure(rows) for rows in found])
    shown = [report_page.table(title(rows), table(rows)) for rows in found]
    return report_page.page(
        "Benchmarks", "Ours over the peer's median; 1 is equal", [figures, *shown]
    )


def figure(rows: Sequence[dict[str, Any]]) -> Any:
    """Each turn's ratio to the peer's median, and where it should be."""
    made, go = report_page.figure("Ours / peer", "ratio", ""), report_page.graph_objects()
    names = [f"{one['case']} / {one['peer']}" for one in rows]
    for sign, colour in (("higher", 2), ("lower", 0)):
        chosen = [(n, one) for n, one in zip(names, rows, strict=True) if one["better"] == sign]
        points = [(n, turn / one["peers"]) for n, one in chosen for turn in one["turns"]["ours"]]
        y, x = [name for name, _ in points], [value for _, value in points]
        marker = {"color": report_page.COLOURS[colour]}
        label = f"{sign} is better"
        made.add_trace(go.Scatter(x=x, y=y, name=label, mode="markers", marker=marker))
    aims = [(n, one["target"]) for n, one in zip(names, rows, strict=True) if one["target"]]
    marker = {"symbol": "line-ns-open", "size": 14, "color": report_page.COLOURS[1]}
    y, x = [name for name, _ in aims], [value for _, value in aims]
    made.add_trace(go.Scatter(x=x, y=y, name="wanted", mode="markers", marker=marker))
    made.update_xaxes(type="log")
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
    made.update_layout(height=160 + 22 * len(rows), margin={"l": 10, "t": 70}, legend=legend)
    made.update_yaxes(automargin=True, autorange="reversed")
    return made


if __name__ == "__main__":
    sys.exit(main())
