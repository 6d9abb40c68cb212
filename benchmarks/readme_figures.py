"""The README's five numbers and its figure, from what the benchmarks measured.

    python benchmarks/readme_figures.py       (make bench-report does it too)

Both are of the machine with the most rows, and the newest row of each case.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import results

ROOT = Path(__file__).resolve().parents[1]
README, FIGURE = ROOT / "README.md", ROOT / "docs" / "images" / "results.svg"
BEGIN, END = "<!-- numbers: make bench-report -->\n", "<!-- end of numbers -->"
Row = dict[str, Any]


@dataclass(frozen=True)
class Number:
    """One comparison that the README shows, in words for somebody who reads it first."""

    benchmark: str
    case: str
    peer: str
    what: str


NUMBERS = (
    Number(
        "trainer_against_hf",
        "documents, its padding",
        "Hugging Face Trainer",
        "Training on documents, packed; the peer pads",
    ),
    Number(
        "trainer_against_hf",
        "full samples, its best settings",
        "Hugging Face Trainer",
        "Training on full samples, the peer at its best settings",
    ),
    Number("host_start", "atoll compose", "plain Hydra app", "Composing and checking a run"),
    Number(
        "launch_to_first_collective",
        "static_node, 8 ranks: to the end",
        "torchrun",
        "Starting 8 ranks, one sum, and their end",
    ),
    Number("tokenize_rate", "whole preparation", "datasets.map", "From text to token shards"),
)


def main() -> int:
    rows = list(results.kept())
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}{table(rows)}{END}{rest.partition(END)[2]}")
    FIGURE.write_text(figure(rows))
    return 0


def chosen(rows: Iterable[Row]) -> list[tuple[Number, Row]]:
    """The newest row of each number, on the machine that most was measured on."""
    rows = list(rows)
    machines = [row["machine"] for row in rows]
    main_machine = max(machines, key=machines.count)
    keyed = {
        (row["benchmark"], row["case"], row["peer"]): row
        for row in rows
        if row["machine"] == main_machine
    }
    return [(each, keyed[each.benchmark, each.case, each.peer]) for each in NUMBERS]


def times_faster(row: Row) -> float:
    ratio = results.ratio(row)
    return ratio if row["better"] == "higher" else 1 / ratio


def table(rows: Iterable[Row]) -> str:
    """Markdown: a line for each number, and the machine."""
    lines = ["| | Atoll | compared with | times as fast |", "|---|---|---|---|"]
    picked = chosen(rows)
    for number, row in picked:
        peer = f"{results.number(row['peers'])} ({number.peer})"
        ours = f"{results.number(row['ours'])} {row['unit']}"
        lines.append(f"| {number.what} | {ours} | {peer} | **{times_faster(row):.3g}** |")
    return "\n".join([*lines, "", f"{about(picked)}\n"])


def about(picked: Sequence[tuple[Number, Row]]) -> str:
    machine = picked[0][1]["machine"]
    days = sorted(row["date"] for _, row in picked)
    where = f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB"
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return f"Medians of interleaved runs on {where}, {when}."


def figure(rows: Iterable[Row]) -> str:
    """SVG: a bar for each number, as many times as long as the peer's is wide."""
    picked = chosen(rows)
    unit = 440 / max(times_faster(row) for _, row in picked)
    height = 60 + 44 * len(picked)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="14">',
        "<title>Times as fast as what it is compared with</title>",
        f'<rect width="760" height="{height}" rx="8" fill="#ffffff"/>',
        '<text x="20" y="28" font-weight="bold" fill="#1b2a33">',
        "Times as fast as… (the red mark: as fast)</text>",
    ]
    for at, (number, row) in enumerate(picked):
        y, times = 48 + 44 * at, times_faster(row)
        parts += [
            f'<text x="20" y="{y + 12}" fill="#1b2a33">{escape(number.what)}</text>',
            f'<rect x="20" y="{y + 18}" width="{times * unit:.0f}" height="14" fill="#0b7285"/>',
            f'<text x="{times * unit + 28:.0f}" y="{y + 30}" fill="#1b2a33">{times:.3g} x '
            f"{escape(number.peer)}</text>",
            # where the peer is
            f'<path d="M{20 + unit:.0f} {y + 16} v18" stroke="#e03131" stroke-width="3"/>',
        ]
    parts += ["</svg>", ""]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
