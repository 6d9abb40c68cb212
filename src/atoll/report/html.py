"""One HTML file that opens offline: figures that can be pointed at, tables, light and dark.

Colours are those that colour-blind people can tell apart (Okabe and Ito 2008).
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from atoll.errors import UserError
from atoll.report.tables import Rows, columns_and_cells

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
PAGE = Path(__file__).with_name("page.html")
NUMBER = re.compile(r"[-+\d.,]*(e[-+]?\d+)?%?")


def page(title: str, about: str, sections: Iterable[str]) -> str:
    """The whole file; sections are made by `table`, `figures` and `folded`."""
    from plotly.offline import get_plotlyjs

    texts = {"title": escape(title), "about": escape(about), "sections": "\n".join(sections)}
    return Template(PAGE.read_text()).substitute(texts, plotly=get_plotlyjs())


def table(title: str, rows: Rows) -> str:
    """Columns of numbers stand to the right."""
    columns, cells = columns_and_cells(rows)
    numbers = [all(map(NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str], tag: str) -> str:
        kinds = (" class=number" if is_number else "" for is_number in numbers)
        marked = (f"<{tag}{kind}>{escape(cell)}" for kind, cell in zip(kinds, row, strict=True))
        return f"<tr>{''.join(marked)}"

    head, body = line(columns, "th"), "\n".join(line(row, "td") for row in cells)
    inside = f"<thead>{head}<tbody>{body}"
    return f"<h2>{escape(title)}</h2><div class=wide><table>{inside}</table></div>"


def folded(title: str, text: str) -> str:
    """Something long, behind its title."""
    inside = f"<div class=wide><pre>{escape(text)}</pre></div>"
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def figures(drawn: Iterable[Any]) -> str:
    """Figures beside each other where the window is wide enough."""
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    plain = {"full_html": False, "include_plotlyjs": False, "config": config}
    parts = (f"<div class=figure>{each.to_html(**plain)}</div>" for each in drawn)
    return f"<div class=figures>{''.join(parts)}</div>"


def new_figure(title: str, x: str, y: str, **layout: Any) -> Any:
    """An empty figure in the report's dress; `UserError` without plotly, which draws."""
    try:
        from plotly.graph_objects import Figure
    except ImportError:
        raise UserError(
            "the report is drawn by plotly, which is not here", "pip install plotly"
        ) from None
    axis = {"gridcolor": "#d7dce1", "zeroline": False}
    clear = "rgba(0,0,0,0)"
    figure = Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}, "x": 0, "xanchor": "left"},
        xaxis={"title": {"text": x}, **axis},
        yaxis={"title": {"text": y}, **axis},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        colorway=COLOURS,
        margin={"l": 60, "r": 15, "t": 40, "b": 45},
        height=320,
        legend={"orientation": "h", "y": -0.25},
        **layout,
    )
    return figure
