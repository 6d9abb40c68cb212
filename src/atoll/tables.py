"""A table as text: plain columns as wide as what they hold, the same on a screen and in a pipe."""

import io
import re
from collections.abc import Sequence

WIDEST = 1 << 16  # columns: rich would cut cells to the terminal's width
NUMBER = re.compile(r"[-+]?[\d.][\d,.]*(e[-+]?\d+)?\s?%?")
NO_NUMBER = {"", "-", "?", "inf", "nan"}  # stand in a column of numbers without making it text


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows below the names of their columns; numbers to the right, text to the left.

    No name at all: no head. None is an empty cell. Nothing is cut, wrapped or coloured.
    """
    from rich.console import Console  # only where a table is drawn: submit starts without it
    from rich.table import Table
    from rich.text import Text

    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for position, name in enumerate(columns):
        numbers = _are_numbers([row[position] for row in texts])
        grid.add_column(Text(name), justify="right" if numbers else "left", no_wrap=True)
    for row in texts:
        grid.add_row(*map(Text, row))
    written = io.StringIO()
    Console(file=written, width=WIDEST, color_system=None).print(grid)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _are_numbers(cells: Sequence[str]) -> bool:
    stated = [cell for cell in cells if cell not in NO_NUMBER]
    return bool(stated) and all(NUMBER.fullmatch(cell) for cell in stated)
