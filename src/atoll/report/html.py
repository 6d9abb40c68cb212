"""One HTML file that opens offline: figures that can be pointed at, tables, light and dark.

Colours are those that colour-blind people can tell apart (Okabe and Ito 2008).
"""

import html
import re
from collections.abc import Sequence
from typing import Any

from atoll.errors import UserError
from atoll.report.tables import Rows, filled

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
# The library writes its colours into each element; `!important` lets the page's own win.
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #5c6670; --line: #d7dce1; --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --faint: #9aa4ae; --line: #3a4149; --page: #14181c } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 0 auto; max-width: 72rem; padding: 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem }
p, caption { color: var(--faint); margin: .2rem 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top }
td.number, th.number { text-align: right; white-space: nowrap }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)) }
.figure { min-width: 0 } summary { cursor: pointer }
.main-svg text { fill: var(--ink) !important }
.main-svg .gridlayer path, .main-svg .zerolinelayer path { stroke: var(--line) !important }
.hoverlayer text { fill: #1b1f24 !important } .hoverlayer path { fill: #fff !important }
"""

# A figure is drawn as soon as it is read, when the grid may not have all its columns yet.
FIT = "window.addEventListener('load', () => window.dispatchEvent(new Event('resize')))"


def page(title: str, about: str, sections: Sequence[str]) -> str:
    """The whole file; sections are made by `table`, `figures` and `folded`."""
    from plotly.offline import get_plotlyjs

    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>"
        f"{''.join(sections)}<script>{FIT}</script></body></html>\n"
    )


def table(title: str, rows: Rows) -> str:
    """Rows of cells, the first of them titles; columns of numbers stand to the right."""
    head, *rest = filled(rows)
    kinds = ["" if _has_words(column) else " class=number" for column in zip(*rest, strict=True)]

    def line(row: list[str], tag: str) -> str:
        cells = zip(kinds, map(html.escape, row), strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{cell}</{tag}>' for kind, cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rest)
    inside = f"<thead>{line(head, 'th')}</thead><tbody>{body}</tbody>"
    return f"<h2>{html.escape(title)}</h2><div class=wide><table>{inside}</table></div>"


def _has_words(column: tuple[str, ...]) -> bool:
    return any(not re.fullmatch(r"[-+\d.,]*%?", cell) for cell in column)


def folded(title: str, text: str) -> str:
    """Something long, behind its title."""
    return (
        f"<details><summary>{html.escape(title)}</summary>"
        f"<div class=wide><pre>{html.escape(text)}</pre></div></details>"
    )


def figures(drawn: Sequence[Any]) -> str:
    """Figures beside each other where the window is wide enough."""
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    plain = {"full_html": False, "include_plotlyjs": False, "config": config}
    parts = (f"<div class=figure>{one.to_html(**plain)}</div>" for one in drawn)
    return f"<div class=figures>{''.join(parts)}</div>"


def figure(title: str, x: str, y: str, **layout: Any) -> Any:
    """An empty figure in the report's dress."""
    go = graph_objects()
    made = go.Figure()
    clear = "rgba(0,0,0,0)"
    made.update_layout(
        title={"text": title, "font": {"size": 15}, "x": 0, "xanchor": "left"},
        xaxis={"title": {"text": x}, "gridcolor": "#d7dce1", "zeroline": False},
        yaxis={"title": {"text": y}, "gridcolor": "#d7dce1", "zeroline": False},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        colorway=COLOURS,
        margin={"l": 60, "r": 15, "t": 40, "b": 45},
        height=320,
        legend={"orientation": "h", "y": -0.25},
        **layout,
    )
    return made


def graph_objects() -> Any:
    """Plotly, which draws; `UserError` where it is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise UserError(
            "the report is drawn by plotly, which is not here", "pip install plotly, or give --text"
        ) from None
    return go
