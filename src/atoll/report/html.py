"""One HTML file that opens offline: figures, tables, light and dark, nothing fetched.

The colours are told apart by colour-blind people (after Okabe and Ito 2008), each of a contrast of
4.5:1 or more to its page.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from atoll.report.drawing import COLOURS, Figure
from atoll.report.tables import Rows, columns_and_cells

LIGHT = {"page": "#ffffff", "ink": "#1b1f24", "faint": "#57606a", "line": "#d7dce1"}
DARK = {"page": "#14181c", "ink": "#e6e9ec", "faint": "#a3adb7", "line": "#3a4149"}
ON_LIGHT = ("#0063a0", "#b34700", "#00734f", "#a1467a", "#855c00")  # of the first series, …
ON_LIGHT_TOO = ("#1f6f9e", "#5f666e", "#332288", "#882255", "#5c6400")
ON_DARK = ("#5ab4f0", "#ff8a4c", "#3dd6a3", "#e9a0cc", "#f0b93a")
ON_DARK_TOO = ("#9adcf5", "#b4bcc4", "#a9a0ff", "#f08ab0", "#d6de70")
# of a figure that stands alone, as the page's button saves it
DRAWN = (
    "svg{font:13px system-ui,sans-serif;overflow:visible;background:#ffffff}"
    "text{fill:#1b2a33}line{stroke:#d5dbe0}.saved{display:inline}"
    ".marks,.line{fill:none}.line{stroke-width:2;stroke:currentColor}"
)
LONG = 40  # letters of a cell that is given room
PAGE = Path(__file__).with_name("page.html")
NUMBER = re.compile(r"[-+\d.,]*(e[-+]?\d+)?%?")


def themes() -> tuple[dict[str, str], dict[str, str]]:
    """The colours of the light and of the dark page, by name; c0 … c9 are those of series."""
    light = enumerate((*ON_LIGHT, *ON_LIGHT_TOO))
    dark = enumerate((*ON_DARK, *ON_DARK_TOO))
    return LIGHT | {f"c{n}": c for n, c in light}, DARK | {f"c{n}": c for n, c in dark}


def page(title: str, about: str, sections: Iterable[str], is_watched: bool = False) -> str:
    """The whole file; sections are made by the functions below."""
    light, dark = themes()
    rules = (f".c{n}{{color:var(--c{n});fill:var(--c{n})}}" for n in range(COLOURS))
    return Template(PAGE.read_text()).substitute(
        title=escape(title),
        about=escape(about),
        sections="\n".join(sections),
        light=_variables(light),
        dark=_variables(dark),
        series="".join(rules),
        light_json=json.dumps(light),
        watched="data-watched" if is_watched else "",
    )


def _variables(theme: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in theme.items())


def table(title: str, rows: Rows) -> str:
    """Columns of numbers stand to the right."""
    return f"<h2>{escape(title)}</h2>{_wide(title, cells(rows))}"


def _wide(title: str, inside: str) -> str:
    """What may be wider than the window, and can then be scrolled by keyboard."""
    return f'<div class=wide tabindex=0 role=region aria-label="{escape(title)}">{inside}</div>'


def cells(rows: Rows, keys: Sequence[str] = ()) -> str:
    """The table alone; keys: of each row, the key of its series in the page's legend."""
    columns, texts = columns_and_cells(rows)
    numbers = [all(map(NUMBER.fullmatch, column)) for column in zip(*texts, strict=True)]

    def line(row: Sequence[str], tag: str, key: str = "") -> str:
        kinds = (" class=number" if is_number else "" for is_number in numbers)
        longer = (
            " class=long" if len(cell) > LONG and not kind else kind
            for cell, kind in zip(row, kinds, strict=True)
        )
        marked = (f"<{tag}{kind}>{escape(cell)}" for kind, cell in zip(longer, row, strict=True))
        named = f' data-key="{escape(key)}"' if key else ""
        return f"<tr{named}>{''.join(marked)}"

    of_rows = keys or [""] * len(texts)
    body = "\n".join(line(row, "td", key) for row, key in zip(texts, of_rows, strict=True))
    return f"<table><thead>{line(columns, 'th scope=col')}<tbody>{body}</table>"


def cards(values: Mapping[str, str]) -> str:
    """Few facts, each under its name; a long one has a line of its own."""
    inside = (
        f"<div{' class=all' if len(v) > LONG else ''}><dt>{escape(k)}<dd>{escape(v)}</div>"
        for k, v in values.items()
    )
    return f"<dl class=cards>{''.join(inside)}</dl>"


def texts(title: str, named: Mapping[str, str]) -> str:
    """Short texts beside each other, as written."""
    inside = (
        f"<figure><figcaption>{escape(k)}</figcaption><pre>{escape(v)}</pre></figure>"
        for k, v in named.items()
    )
    return f"<h2>{escape(title)}</h2><div class=beside>{''.join(inside)}</div>"


def folded(title: str, text: str, marked: Iterable[str] = ()) -> str:
    """Something long, behind its title; lines of these numbers of it are marked."""
    lines = set(marked)
    shown = (
        f"<mark>{escape(line)}</mark>" if line in lines else escape(line)
        for line in text.splitlines()
    )
    inside = _wide(title, f"<pre>{chr(10).join(shown)}</pre>")
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def legend(names: Mapping[str, int]) -> str:
    """The one of the page: a box for each run, which shows or hides it in every figure."""
    boxes = (
        f'<label><input type=checkbox checked data-key="{escape(name)}">'
        f"<span class=c{colour % COLOURS}>{'▬' if colour < COLOURS else '╌'}</span>"
        f"{escape(name)}</label>"
        for name, colour in names.items()
    )
    return f"<fieldset class=legend><legend>Shown</legend>{''.join(boxes)}</fieldset>"


def figures(drawn: Iterable[Figure]) -> str:
    """Figures beside each other where the window is wide enough."""
    return f"<div class=figures>{''.join(figure(each.drawn()) for each in drawn)}</div>"


def figure(drawn: Figure) -> str:
    """The figure under its title, with its values as a table, and a button that saves it."""
    title = escape(drawn.title)
    names = "".join(
        f"<span><b class=c{colour % COLOURS}>■</b> {escape(name)}</span>"
        for name, colour in drawn.own_legend.items()
    )
    caption = f"<p>{escape(drawn.caption)}</p>" if drawn.caption else ""
    data = cells(drawn.rows(), drawn.keys()) if drawn.rows() else "<p>No values."
    return (
        f"<figure class=figure><h3>{title}</h3>{drawn.svg()}"
        f"<p class=point aria-live=polite>&nbsp;</p><figcaption>{names}{caption}</figcaption>"
        f'<button type=button class=save aria-label="Save {title} as SVG">Save SVG</button>'
        f"<details><summary>Values<span class=unseen> of {title}</span></summary>"
        f"{_wide(f'Values of {drawn.title}', data)}</details></figure>"
    )


def standalone(drawn: Figure) -> str:
    """The figure as an SVG file of its own, light, with its title and its legend."""
    colours = (f".c{n}{{color:{c};fill:{c}}}" for n, c in enumerate((*ON_LIGHT, *ON_LIGHT_TOO)))
    head, begin, rest = drawn.drawn().svg().partition("<title>")
    head = re.sub(r'viewBox="[^"]*"(.*) data-full="([^"]*)"', r'viewBox="\2"\1', head)
    # the last rule counts: lines have no area
    style = f"<style>{''.join(colours)}{DRAWN}</style>"
    return f"{head}{style}{begin}{rest}\n"
