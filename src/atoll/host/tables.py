"""Plain text tables."""


def columns(rows: list[list[str]]) -> str:
    """Rows of cells under each other; the first column to the left, numbers to the right."""
    width = max(map(len, rows))
    full = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in full) for i in range(width)]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if i in (0, width - 1) else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in full
    )


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.2f}"
