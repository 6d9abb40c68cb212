"""Tables as text, CSV and Markdown."""

import csv
import io
from collections.abc import Callable

Rows = list[list[str]]  # the first row holds the titles


def columns(rows: Rows) -> str:
    """Rows of cells under each other; the first column to the left, numbers to the right."""
    full = filled(rows)
    widths = [max(len(row[i]) for row in full) for i in range(len(full[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if i in (0, len(widths) - 1) else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in full
    )


def comma_separated(rows: Rows) -> str:
    """Numbers without the commas that a person reads them by."""
    text = io.StringIO()
    plain = [[_plain(cell) for cell in row] for row in filled(rows)]
    csv.writer(text, lineterminator="\n").writerows(plain)
    return text.getvalue().rstrip()


def markdown(rows: Rows) -> str:
    head, *rest = [[cell.replace("|", "\\|") for cell in row] for row in filled(rows)]
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


STYLES: dict[str, Callable[[Rows], str]] = {
    "text": columns,
    "csv": comma_separated,
    "markdown": markdown,
}


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.2f}"


def filled(rows: Rows) -> Rows:
    """Rows of the same length."""
    width = max(map(len, rows))
    return [[*row, *[""] * (width - len(row))] for row in rows]


def _plain(cell: str) -> str:
    bare = cell.replace(",", "")
    try:
        float(bare)
    except ValueError:
        return cell
    return bare
