"""Figures as data, and as SVG that needs no library: curves over an axis, and bars in rows.

A series is of one run or facility wherever its key is the same: the page's legend hides it in all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from atoll.report.scale import Scale, scale_of, written
from atoll.report.tables import Rows

WIDTH, HEIGHT = 440, 280
TOP, RIGHT, BOTTOM = 14, 14, 42
ROW_HEIGHT, LETTER = 26, 7.2  # LETTER: the width of one, about
COLOURS = 10  # of the page, .c0 to .c9
MOST_POINTS, MOST_ROWS = 200, 2000  # of a series, of a figure
DASHES = ("", "6 3", "2 3")
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one run or facility. style: line, dashed, points or rings."""

    name: str
    colour: int
    points: Sequence[Point]
    style: str = "line"
    key: str = ""  # in the page's legend; empty: not in it

    @property
    def dash(self) -> str:
        """Where there are more runs than colours, the next ones are dashed."""
        again = self.colour // COLOURS % len(DASHES)
        return "6 3" if self.style == "dashed" else DASHES[again]

    @property
    def klass(self) -> str:
        return f"c{self.colour % COLOURS}"


@dataclass(frozen=True)
class Span:
    """A bar in a row, from a value to a value; a mark where both are the same."""

    row: str
    series: str
    begin: float
    end: float
    note: str = ""


@dataclass(frozen=True)
class Curves:
    """Series over two axes. `caption`: what the marks mean."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    caption: str = ""
    ticks: Sequence[float] = ()  # at the x axis, where they are not any round values

    @property
    def own_legend(self) -> dict[str, int]:
        return {each.name: each.colour for each in self.series if not each.key}

    def drawn(self) -> "Curves":
        """The same with as many points as a page can carry, the first and last among them."""
        most = max(20, min(MOST_POINTS, MOST_ROWS // max(1, len(self.series))))
        series = [
            Series(each.name, each.colour, thinned(each.points, most), each.style, each.key)
            for each in self.series
            if each.points
        ]
        return Curves(
            self.title, self.x, self.y, series, self.log_x, self.log_y, self.caption, self.ticks
        )

    def rows(self) -> Rows:
        return [
            {"series": each.name, self.x: f"{x:.6g}", self.y: f"{y:.6g}"}
            for each in self.series
            for x, y in each.points
        ]

    def keys(self) -> list[str]:
        """Of each row of the table, the key of its series in the legend."""
        return [each.key for each in self.series for _ in each.points]

    def text(self) -> str:
        """What the figure shows, for those who do not see it."""
        ends = [
            f"{each.name}: {written(each.points[0][1])} at {written(each.points[0][0])}, "
            f"{written(each.points[-1][1])} at {written(each.points[-1][0])}"
            for each in self.series
            if each.points
        ]
        return f"{self.y} over {self.x}. {'; '.join(ends) or 'no values'}."

    def svg(self) -> str:
        points = [point for each in self.series for point in each.points]
        x = scale_of([a for a, _ in points], self.log_x)
        y = scale_of([b for _, b in points], self.log_y)
        left = 16 + LETTER * max(len(written(tick)) for tick in y.ticks()) + 14
        frame = _Frame(x, y, left, HEIGHT)
        ticks = [tick for tick in self.ticks or x.ticks() if x.low <= tick <= x.high]
        parts = [*frame.x_axis(ticks, self.x), *frame.y_axis(self.y)]
        parts += [part for each in self.series for part in frame.series(each)]
        return _svg(self.title, self.text(), HEIGHT, parts, self.all_series())

    def all_series(self) -> list[tuple[str, int]]:
        return [(each.name, each.colour) for each in self.series]


@dataclass(frozen=True)
class Bars:
    """Spans in rows; each series has its colour, in the order of `colours`."""

    title: str
    x: str
    spans: Sequence[Span]
    colours: dict[str, int]
    log_x: bool = False
    caption: str = ""

    @property
    def own_legend(self) -> dict[str, int]:
        used = {span.series for span in self.spans}
        return {name: colour for name, colour in self.colours.items() if name in used}

    def drawn(self) -> "Bars":
        return self

    def rows(self) -> Rows:
        return [
            {"row": s.row, "series": s.series, "from": f"{s.begin:.6g}", "to": f"{s.end:.6g}"}
            | ({"note": s.note} if s.note else {})
            for s in self.spans
        ]

    def keys(self) -> list[str]:
        return [""] * len(self.spans)

    def text(self) -> str:
        rows: dict[str, list[str]] = {}
        for s in self.spans:
            value = written(s.begin) if s.begin == s.end else written(s.end - s.begin)
            rows.setdefault(s.row, []).append(f"{s.series} {value}")
        listed = (f"{row}: {', '.join(values[:12])}" for row, values in rows.items())
        return f"{self.x}. {'; '.join(listed) or 'no values'}."

    def svg(self) -> str:
        rows = list(dict.fromkeys(span.row for span in self.spans))
        ends = [end for span in self.spans for end in (span.begin, span.end)]
        x = scale_of(ends, self.log_x, from_zero=not self.log_x)
        height = TOP + BOTTOM + ROW_HEIGHT * max(1, len(rows))
        longest = max((len(row) for row in rows), default=0)
        frame = _Frame(x, Scale(0, 1, False), min(200.0, 12 + LETTER * longest), height)
        parts = frame.x_axis(x.ticks(), self.x)
        for at, row in enumerate(rows):
            middle = TOP + ROW_HEIGHT * (at + 0.5)
            parts.append(_text(frame.left - 6, middle + 4, _shortened(row, 27), "end"))
            for span in (span for span in self.spans if span.row == row):
                colour = f"c{self.colours[span.series] % COLOURS}"
                parts.append(frame.bar(span, middle, colour))
        return _svg(self.title, self.text(), height, parts, list(self.own_legend.items()))


Figure = Curves | Bars


@dataclass(frozen=True)
class _Frame:
    """Where values stand on the paper."""

    x: Scale
    y: Scale
    left: float
    height: float

    def across(self, value: float) -> float:
        return self.left + self.x.share(value) * (WIDTH - RIGHT - self.left)

    def down(self, value: float) -> float:
        bottom = self.height - BOTTOM
        return bottom - self.y.share(value) * (bottom - TOP)

    def x_axis(self, ticks: Sequence[float], title: str) -> list[str]:
        bottom = self.height - BOTTOM
        parts = []
        for tick in ticks:
            at = self.across(tick)
            parts.append(_line(at, TOP, at, bottom))
            parts.append(_text(at, bottom + 16, written(tick), "middle"))
        return [*parts, _text((self.left + WIDTH - RIGHT) / 2, self.height - 6, title, "middle")]

    def y_axis(self, title: str) -> list[str]:
        parts = []
        for tick in self.y.ticks():
            at = self.down(tick)
            parts.append(_line(self.left, at, WIDTH - RIGHT, at))
            parts.append(_text(self.left - 5, at + 4, written(tick), "end"))
        middle = (TOP + self.height - BOTTOM) / 2
        turned = f' transform="rotate(-90 12 {middle:.1f})"'
        return [*parts, _text(12, middle, title, "middle", turned)]

    def series(self, series: Series) -> Iterator[str]:
        places = [
            (self.across(x), self.down(y))
            for x, y in series.points
            if not ((self.x.is_log and x <= 0) or (self.y.is_log and y <= 0))
        ]
        marks = f'data-key="{escape(series.key)}" data-name="{escape(series.name)}"'
        listed = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        line = "line" if series.style in ("line", "dashed") else "marks"
        dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
        yield f'<g class="series {series.klass}" {marks}>'
        yield f'<polyline class="{line}" points="{listed}"{dash}/>'
        if len(places) == 1 or (len(places) <= 40 and series.style != "dashed"):
            ring = " class=ring" if series.style == "rings" else ""
            yield from (f'<circle{ring} cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in places)
        yield "</g>"

    def bar(self, span: Span, middle: float, colour: str) -> str:
        begin, end = self.across(span.begin), self.across(span.end)
        length = written(span.end - span.begin if span.end != span.begin else span.begin)
        title = (
            f"<title>{escape(f'{span.row}: {span.series} {length} {span.note}'.strip())}</title>"
        )
        if span.begin == span.end:
            place = f'cx="{begin:.1f}" cy="{middle:.1f}" r="4"'
            return f'<circle class="{colour}" {place}>{title}</circle>'
        width, top = max(0.5, end - begin), middle - ROW_HEIGHT * 0.36
        place = (
            f'x="{begin:.1f}" y="{top:.1f}" width="{width:.1f}" height="{ROW_HEIGHT * 0.72:.1f}"'
        )
        return f'<rect class="{colour}" {place}>{title}</rect>'


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Every so many-th point, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(at * (len(points) - 1) / (most - 1))] for at in range(most)]


def _svg(
    title: str, text: str, height: float, parts: Sequence[str], names: Sequence[tuple[str, int]]
) -> str:
    """With a title for the saved file, and the legend that the page has elsewhere."""
    lines = [
        f'<rect class="c{colour % COLOURS}" x="8" y="{height + 6 + 18 * at}" '
        'width="12" height="12"/>' + _text(26, height + 16 + 18 * at, _shortened(name, 60), "start")
        for at, (name, colour) in enumerate(names)
    ]
    head = _text(8, -8, title, "start", ' font-weight="bold"')
    full = f"0 -24 {WIDTH} {height + 32 + 18 * len(lines):.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'tabindex="0" data-full="{full}"><title>{escape(title)}</title>'
        f"<desc>{escape(text)}</desc>{''.join(parts)}"
        f'<g class="saved">{head}{"".join(lines)}</g></svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
