"""The atlas as a page: tables and figures of what results/atlas.jsonl has, into docs/atlas.md.

Everything is against the synchronous run of the same seed, facilities and texts, and so many steps:
how much more the loss is, and how many fewer the bytes. Intervals: 95 %, by Student's t over seeds.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from atlas_costs import costs, widest_gap
from atlas_rounds import SYNCHRONOUS

from atoll.federation.codec import CODECS
from atoll.federation.step import STEPS
from atoll.report import tables
from atoll.report.drawing import Curves, Series
from atoll.report.html import standalone
from atoll.run_dir import write_whole

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- make bench-atlas -->\n", "<!-- end of atlas -->"
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # by the number of seeds
# so many times fewer bytes -> the most that the loss may be above the synchronous one
GOALS = {20: 0.003, 100: 0.01}
DEVICE = "device"  # of a row: the GPU that made it; without one, processors did
# of the figures: beside what loses more, all else would be one line
DRAWN, DRAWN_GAP = ("replace", "nesterov"), 0.3
NAMES = {"iid": "mixed text", "by_language": "a language each"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One way to train together, against the synchronous runs of the same seeds."""

    update: str
    codec: str
    inner_steps: int
    facilities: int
    split: str
    fragments: int
    overlap_rounds: int
    merge_alpha: float
    optimizer: str
    rates: str
    gaps: Sequence[float]  # of the loss, a share
    over_adamw: Sequence[float]  # gaps to AdamW's synchronous runs, of the seeds that have one
    answered: Sequence[float]  # the share of questions, less the synchronous one
    fewer_bytes: float

    @property
    def gap(self) -> float:
        return statistics.mean(self.gaps)

    @property
    def fragments_shown(self) -> str:
        late = f", taken {self.overlap_rounds} round later" if self.overlap_rounds else ""
        mixed = f", {self.merge_alpha:g} of its own kept" if self.merge_alpha else ""
        return f"{self.fragments}{late}{mixed}"

    @property
    def texts(self) -> str:
        return f"{self.facilities}, {NAMES[self.split]}"

    def shown(self) -> str:
        return shown(self.gaps)


def shown(gaps: Sequence[float]) -> str:
    """Their mean in percent, with its interval where there are seeds enough for one."""
    if not gaps:
        return "?"
    spread = ""
    if len(gaps) in T_95:
        half = T_95[len(gaps)] * statistics.stdev(gaps) / sqrt(len(gaps))
        spread = f" ± {100 * half:.1f}"
    return f"{100 * statistics.mean(gaps):+.1f}{spread} %"


def write(rows: Sequence[Row]) -> None:
    """The page and its figures, of campaigns of the length of which most can be compared."""
    steps, points = most_compared(rows)
    if not points:
        print("nothing to compare yet: make bench-atlas")
        return
    page = DOCS / "atlas.md"
    before, _, rest = page.read_text().partition(BEGIN)
    text = "\n\n".join(sections(steps, points, rows))
    write_whole(page, f"{before}{BEGIN}{text}\n{END}{rest.partition(END)[2]}")
    for split in {point.split for point in points}:
        whole = [point for point in points if _is_usual(point)]
        write_whole(DOCS / "images" / f"atlas_{split}.svg", figure(split, whole))
    print(text)


def most_compared(rows: Sequence[Row]) -> tuple[int, list[Point]]:
    """The length of campaigns of which most can be compared; of two the longer."""
    points = by_steps(rows)
    steps = max(points, key=lambda n: (len(points[n]), n), default=0)
    return steps, points.get(steps, [])


def by_steps(rows: Sequence[Row]) -> dict[int, list[Point]]:
    """What can be compared, by the length of the campaigns."""
    lengths = sorted({row["cell"]["steps"] for row in rows})
    return {n: points_of([row for row in rows if row["cell"]["steps"] == n]) for n in lengths}


def points_of(rows: Sequence[Row]) -> list[Point]:
    """Seeds put together; the seed of tuning is not among them, nor rates that were not chosen."""
    compared = [row for row in rows if row["cell"]["seed"] > 0]
    beside = {_texts_of(row): row for row in compared if row["cell"]["update"] == SYNCHRONOUS}
    newest: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in compared:
        if row["cell"]["update"] != SYNCHRONOUS and _texts_of(row) in beside:
            newest.setdefault(_way_of(row), {})[row["cell"]["seed"]] = row
    return [_point(way, list(seeds.values()), beside) for way, seeds in newest.items()]


def _texts_of(row: Row) -> tuple[Any, ...]:
    names = ("optimizer", "facilities", "split", "seed")
    return (*(row["cell"][name] for name in names), DEVICE in row)


def _way_of(row: Row) -> tuple[Any, ...]:
    names = ("update", "codec", "inner_steps", "facilities", "split")
    names += ("fragments", "overlap_rounds", "merge_alpha", "optimizer")
    return tuple(row["cell"][name] for name in names)


def _point(way: tuple[Any, ...], rows: Sequence[Row], beside: Mapping[Any, Row]) -> Point:
    pairs = [(row, beside[_texts_of(row)]) for row in rows]
    usual = [(row, beside.get(("adamw", *_texts_of(row)[1:]))) for row in rows]
    cell = rows[-1]["cell"]
    momentum = "" if cell["update"] == "replace" else f", {cell['beta1']:g}"
    return Point(
        *way,
        rates=f"{cell['outer_rate']:g}{momentum}",
        gaps=[ours["test"] / peer["test"] - 1 for ours, peer in pairs],
        over_adamw=[ours["test"] / peer["test"] - 1 for ours, peer in usual if peer],
        answered=[ours["answered"] - peer["answered"] for ours, peer in pairs],
        fewer_bytes=statistics.mean(peer["bytes"] / ours["bytes"] for ours, peer in pairs),
    )


def sections(steps: int, points: Sequence[Point], rows: Sequence[Row]) -> Iterable[str]:
    of_steps = [row for row in rows if row["cell"]["steps"] == steps]
    yield (
        f"{len(of_steps)} runs of {steps:,} steps at each facility, {time_of(of_steps)}; "
        f"{of_steps[0]['parameters']:,} parameters; AdamW's rate "
        f"{rate_of(of_steps):g} at its peak."
    )
    yield "## How near to the synchronous run"
    whole = [point for point in points if _is_usual(point)]
    yield tables.markdown(goals(whole))
    yield "## By encoding and length of a round"
    for split in NAMES:
        if any(point.split == split for point in whole):
            yield f"![Loss against bytes, {NAMES[split]}](images/atlas_{split}.svg)"
    yield tables.markdown(by_length(whole))
    if lines := costs([point for point in whole if len(point.gaps) in T_95]):
        yield "## What an encoding and a step cost"
        yield "In points of loss, of combinations that have seeds enough for an interval."
        yield tables.markdown(lines)
    if lines := in_fragments(points):
        yield "## In fragments"
        yield tables.markdown(lines)
    if lines := with_muon(points):
        yield f"## With Muon\n\nIts rate is {rate_of(of_steps, 'muon'):g} at its peak."
        yield tables.markdown(goals([point for point in points if point.optimizer == "muon"]))
        yield tables.markdown(lines)
    if lines := longer(by_steps(rows)):
        yield "## Longer campaigns"
        for more, of_more in by_steps(rows).items():
            if more > steps and of_more:
                yield f"After {more:,} steps:"
                yield tables.markdown(goals(of_more))
        yield tables.markdown(lines)
    yield "## The synchronous runs"
    if gap := widest_gap([row for row in of_steps if row["cell"]["update"] == SYNCHRONOUS], DEVICE):
        yield f"Of one seed, those of a GPU and of processors are up to {100 * gap:.1f} % apart."
    yield tables.markdown(synchronous(rows))


def time_of(rows: Sequence[Row]) -> str:
    hours = sum(row.get("processor_seconds", 0.0) for row in rows) / 3600
    seconds: dict[str, float] = {}
    for row in rows:
        if DEVICE in row:
            seconds[row[DEVICE]] = seconds.get(row[DEVICE], 0.0) + row["device_seconds"]
    on_gpus = [f"{of_gpu / 60:.1f} minutes of an {gpu}" for gpu, of_gpu in seconds.items()]
    return ", ".join([f"{hours:.1f} processor hours", *on_gpus])


def rate_of(rows: Sequence[Row], optimizer: str = "adamw") -> float:
    cells = [row["cell"] for row in rows if row["cell"]["seed"] > 0]
    return float([cell["rate"] for cell in cells if cell["optimizer"] == optimizer][-1])


def _is_usual(point: Point) -> bool:
    return point.fragments == 1 and point.optimizer == "adamw"


def goals(points: Sequence[Point]) -> list[dict[str, str]]:
    """Of each optimizer, text and number of facilities the best way within so many bytes.

    Of those with the most seeds: one that was tried once may have been lucky.
    """
    lines = []
    for way in sorted({_compared_in(point) for point in points}, reverse=True):
        for fewer, most in GOALS.items():
            within = [p for p in points if _compared_in(p) == way and p.fewer_bytes >= fewer]
            if not within:
                continue
            best = min(within, key=lambda point: (-len(point.gaps), point.gap))
            miss = best.gap - most
            lines.append(
                {
                    "facilities": best.texts,
                    "optimizer": best.optimizer,
                    "bytes": f"1/{fewer} or fewer",
                    "best": f"{best.update} ({best.rates}), {best.codec}, {best.inner_steps} steps",
                    "its bytes": f"1/{best.fewer_bytes:.0f}",
                    "loss": best.shown(),
                    "wanted": f"{100 * most:g} %",
                    "": "reached" if miss <= 0 else f"missed by {100 * miss:.2f} points",
                    "answered": f"{100 * statistics.mean(best.answered):+.1f} points",
                    "seeds": str(len(best.gaps)),
                }
            )
    return lines


def _compared_in(point: Point) -> tuple[Any, ...]:
    return point.split, point.facilities, point.optimizer


def by_length(points: Sequence[Point]) -> list[dict[str, str]]:
    """A line for each step and encoding, a column for each number of steps in a round."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    lengths = sorted({point.inner_steps for point in points})
    for point in sorted(points, key=_line_of):
        way = (point.facilities, NAMES[point.split], point.update, point.codec)
        names = ("facilities", "texts", "update", "codec")
        blank = dict(zip(names, map(str, way), strict=True)) | dict.fromkeys(map(str, lengths), "")
        cell = f"{point.shown()}, 1/{point.fewer_bytes:.0f}"
        lines.setdefault(way, blank)[str(point.inner_steps)] = cell
    return list(lines.values())


def _line_of(point: Point) -> tuple[Any, ...]:
    """As the rules and encodings are listed, texts that are mixed first."""
    kinds = (list(STEPS).index(point.update), list(CODECS).index(point.codec))
    return point.facilities, list(NAMES).index(point.split), *kinds


def in_fragments(points: Sequence[Point]) -> list[dict[str, str]]:
    """Each way to send a model in parts, beside the whole model as often and in as many bytes."""
    divided = [point for point in points if point.fragments > 1]
    asked = {(p.facilities, p.split, p.update, p.codec, _averaged_every(p)) for p in divided}
    return [
        {
            "facilities": point.texts,
            "update": f"{point.update} ({point.rates}), {point.codec}",
            "averaged every": f"{_averaged_every(point)} steps",
            "fragments": point.fragments_shown,
            "loss": point.shown(),
            "bytes": f"1/{point.fewer_bytes:.0f}",
            "seeds": str(len(point.gaps)),
        }
        for way in sorted(asked)
        for point in points
        if (point.facilities, point.split, point.update, point.codec, _averaged_every(point)) == way
    ]


def with_muon(points: Sequence[Point]) -> list[dict[str, str]]:
    """Campaigns whose facilities step with Muon, beside both synchronous runs."""
    return [
        {
            "facilities": point.texts,
            "update": f"{point.update} ({point.rates}), {point.codec}",
            "round": f"{point.inner_steps} steps",
            "bytes": f"1/{point.fewer_bytes:.0f}",
            "loss over Muon's": point.shown(),
            "over AdamW's": shown(point.over_adamw),
            "seeds": str(len(point.gaps)),
        }
        for point in sorted(points, key=lambda p: (p.split, p.update, p.inner_steps))
        if point.optimizer == "muon"
    ]


def longer(points: Mapping[int, Sequence[Point]]) -> list[dict[str, str]]:
    """Ways that campaigns of more than one length have tried: does the gap close?"""
    ways: dict[tuple[Any, ...], dict[int, Point]] = {}
    for steps, of_steps in points.items():
        for p in of_steps:
            way = (p.texts, p.optimizer, p.update, p.codec, p.inner_steps, p.fragments_shown)
            ways.setdefault(way, {})[steps] = p
    lengths = sorted({steps for tried in ways.values() if len(tried) > 1 for steps in tried})
    names = ("facilities", "optimizer", "update", "codec", "round", "fragments")
    return [
        dict(zip(names, map(str, way), strict=True))
        | {f"{n:,} steps": tried[n].shown() if n in tried else "" for n in lengths}
        for way, tried in sorted(ways.items())
        if len(tried) > 1
    ]


def _averaged_every(point: Point) -> int:
    return point.fragments * point.inner_steps


def synchronous(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Their losses, each a mean over seeds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cell = row["cell"]
        if cell["update"] == SYNCHRONOUS and cell["seed"] > 0:
            way = (cell["steps"], cell["optimizer"], cell["facilities"], cell["split"])
            groups.setdefault(way, []).append(row)
    return [
        {
            "steps": f"{steps:,}",
            "optimizer": optimizer,
            "facilities": f"{facilities}, {NAMES[split]}",
            "nats a byte": f"{statistics.mean(row['test'] for row in group):.4f}",
            "answered": f"{100 * statistics.mean(row['answered'] for row in group):.1f} %",
            "MB of a facility": f"{group[0]['bytes'] / 1e6:,.0f}",
            "seeds": str(len({row["cell"]["seed"] for row in group})),
        }
        for (steps, optimizer, facilities, split), group in sorted(groups.items())
    ]


def figure(split: str, points: Sequence[Point]) -> str:
    """How much more the loss is, over how many fewer the bytes: a line for each encoding."""
    of_split = [p for p in points if p.split == split and p.facilities == 4]
    of_split = [p for p in of_split if p.update in DRAWN and p.gap <= DRAWN_GAP]
    of_split.sort(key=_line_of)
    curves = []
    for at, (update, codec) in enumerate(dict.fromkeys((p.update, p.codec) for p in of_split)):
        chosen = [p for p in of_split if (p.update, p.codec) == (update, codec)]
        values = sorted((p.fewer_bytes, 100 * p.gap) for p in chosen)
        style = "line" if update == "replace" else "dashed"
        curves.append(Series(f"{update}, {codec}", at, values, style))
    drawn = Curves(
        f"Four facilities, {NAMES[split]}: loss above the synchronous run's, up to "
        f"{100 * DRAWN_GAP:g} %",
        "times fewer bytes than the synchronous run",
        "% more loss",
        curves,
        log_x=True,
    )
    return standalone(drawn)
