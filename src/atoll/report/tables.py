"""Tables as text, CSV and Markdown."""

import csv
import io
from collections.abc import Mapping, Sequence

from atoll.cluster.goodput import effective
from atoll.tables import table as aligned

Rows = Sequence[dict[str, str]]  # column -> cell; a row may lack a column


def columns_and_cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """The names of all columns, as they first occur, and as many cells in each row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name, "") for name in columns] for row in rows]


def text(rows: Rows) -> str:
    return aligned(*columns_and_cells(rows))


def comma_separated(rows: Rows) -> str:
    """Numbers without the commas that a person reads them by; percentages as shares of 1."""
    columns, cells = columns_and_cells(rows)
    file = io.StringIO()
    lines = [columns, *([_plain(cell) for cell in row] for row in cells)]
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue().rstrip()


def markdown(rows: Rows) -> str:
    columns, cells = columns_and_cells(rows)
    lines = [columns, ["---"] * len(columns), *cells]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


STYLES = {"text": text, "csv": comma_separated, "markdown": markdown}


def number(value: float | None, digits: int = 1) -> str:
    """Nothing for what is not known."""
    return "" if value is None else f"{value:.{digits}f}"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.2f}"


def in_minutes(node_seconds: Mapping[str, float]) -> dict[str, str]:
    """The columns of a goodput, and the share of them in which a run got on."""
    minutes = {name: number(seconds / 60, 3) for name, seconds in node_seconds.items()}
    return {**minutes, "effective": f"{effective(node_seconds):.1%}"}


def _plain(cell: str) -> str:
    bare = cell.replace(",", "")
    try:
        if bare.endswith("%"):
            return f"{float(bare[:-1]) / 100:.6g}"
        float(bare)
    except ValueError:
        return cell
    return bare
