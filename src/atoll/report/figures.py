"""The figures of runs and of campaigns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from atoll.cluster.goodput import COLUMNS, goodput
from atoll.plan.traffic import total
from atoll.report.campaign import Part, Round, spent
from atoll.report.html import COLOURS, new_figure
from atoll.report.run import Record, RunMetrics

# What a facility does in a round, in this order, each with its colour.
SPANS = {"send": COLOURS[5], "queue": COLOURS[6], "train": COLOURS[0], "fetch": COLOURS[4]}
AVERAGE = COLOURS[3]
SPENT = (*COLOURS, "#332288", "#882255", "#DDCC77")  # a colour for each column of the goodput
FACILITIES = tuple(colour for colour in COLOURS if colour != AVERAGE)


def of_runs(runs: Sequence[RunMetrics]) -> Iterator[Any]:
    """Loss, perplexity and rates of each run; scaling where they have different sizes."""
    yield _curves(runs, "Training loss", "tokens", "loss", "loss")
    yield _curves(runs, "Training loss over time", "minutes", "loss", "loss")
    records = [line for run in runs for line in run.evaluations]
    quality = "perplexity" if all("perplexity" in line for line in records) else "loss"
    yield _curves(runs, f"Held-out {quality}", "tokens", quality, quality, _evaluations)
    yield _curves(runs, f"Held-out {quality} over time", "minutes", quality, quality, _evaluations)
    yield _curves(runs, "Throughput", "step", "tokens/s", "tokens_per_second")
    yield _curves(runs, "Model FLOP utilisation", "step", "share of peak", "mfu")
    yield _curves(runs, "Memory of a rank", "step", "GiB", "memory_gib")
    if any(run.checkpoints for run in runs):
        yield _checkpoints(runs)
    if any(run.communication for run in runs):
        yield _communication(runs)
    yield _goodput({run.name: goodput(run.folder) for run in runs})
    if len({run.devices for run in runs}) > 1:
        yield _scaling(runs)


def _training(run: RunMetrics) -> list[Record]:
    return run.train


def _evaluations(run: RunMetrics) -> list[Record]:
    """With the tokens that were trained on before each, where they are known."""
    tokens = {line["step"]: line["tokens"] for line in run.train} | {0: 0}
    known = (line for line in run.evaluations if line.get("step") in tokens)
    return [line | {"tokens": tokens[line["step"]]} for line in known]


def _curves(
    runs: Sequence[RunMetrics],
    title: str,
    x: str,
    unit: str,
    key: str,
    records: Callable[[RunMetrics], list[Record]] = _training,
) -> Any:
    """A line for each run, of the records that have both values."""
    figure = new_figure(title, x, unit)
    for run in runs:
        pairs = ((_position(run, line, x), line.get(key)) for line in records(run))
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        _line(figure, run.name, known, marker={"size": 5})
    return figure


def _position(run: RunMetrics, line: Record, x: str) -> float | None:
    if x == "minutes" and "time" in line:
        return float(line["time"] - run.start["time"]) / 60
    return line.get(x)


def _line(figure: Any, name: str, points: Iterable[tuple[Any, Any]], **style: Any) -> None:
    x, y = [list(values) for values in zip(*points, strict=True)] or ([], [])
    figure.add_scatter(x=x, y=y, name=name, **{"mode": "lines+markers"} | style)


def _checkpoints(runs: Sequence[RunMetrics]) -> Any:
    """Until each was complete, and how long training stood still for it."""
    figure = new_figure("Checkpoints", "step", "seconds")
    for number, run in enumerate(runs):
        for name, key, symbol in (("saved", "save", "circle"), ("blocked", "blocked", "x")):
            points = [(line["step"], line[f"{key}_seconds"]) for line in run.checkpoints]
            marker = {"color": COLOURS[number % len(COLOURS)], "symbol": symbol, "size": 8}
            _line(figure, f"{run.name}, {name}", points, mode="markers", marker=marker)
    return figure.update_yaxes(type="log")


def _communication(runs: Sequence[RunMetrics]) -> Any:
    figure = new_figure("Communication per rank and step", "", "MiB", barmode="group")
    profiles = {run.name: run.communication[-1] for run in runs if run.communication}
    expected = [(total(line["expected_bytes"]) or 0) / 2**20 for line in profiles.values()]
    wire = [line["wire_bytes"] / 2**20 for line in profiles.values()]
    figure.add_bar(x=list(profiles), y=expected, name="expected")
    return figure.add_bar(x=list(profiles), y=wire, name="observed on the wire")


def _goodput(spent: Mapping[str, Mapping[str, float]]) -> Any:
    """What became of each node-minute, a bar for each run or facility."""
    figure = new_figure("Goodput", "node-minutes", "", barmode="stack")
    for position, name in enumerate(COLUMNS):
        minutes = [columns.get(name, 0.0) / 60 for columns in spent.values()]
        style = {"orientation": "h", "marker": {"color": SPENT[position]}}
        figure.add_bar(y=list(spent), x=minutes, name=name, **style)
    return figure


def _scaling(runs: Sequence[RunMetrics]) -> Any:
    """Tokens per second against devices, and the line of a perfect speed-up over the smallest."""
    figure = new_figure("Scaling", "devices", "tokens/s")
    devices, rates = [run.devices for run in runs], [run.tokens_per_second for run in runs]
    ideal = [rates[0] * count / devices[0] for count in devices]
    _line(figure, "observed", zip(devices, rates, strict=True))
    figure.add_scatter(x=devices, y=ideal, name="ideal", line={"dash": "dot"})
    figure.update_xaxes(type="log", tickvals=devices)
    return figure.update_yaxes(type="log")


def of_campaign(rounds: Sequence[Round]) -> Iterator[Any]:
    """Who was at what when; losses, bytes and weights, round by round."""
    yield _timeline(rounds)
    yield _goodput(spent(rounds))
    yield _losses(rounds)
    yield _by_facility(
        rounds, "Bytes in a round", "MiB", lambda p: (p.sent_bytes + p.received_bytes) / 2**20
    )
    yield _by_facility(rounds, "Weight in the round's model", "share", lambda p: p.weight or 0)


def _timeline(rounds: Sequence[Round]) -> Any:
    figure = new_figure("Timeline", "minutes", "", barmode="overlay")
    parts = [part for each in rounds for part in each.parts]
    bars = {
        name: [(p.facility, p.round, *p.spans[name]) for p in parts if name in p.spans]
        for name in SPANS
    }
    bars["average"] = [
        ("average", each.number, each.ended - (each.average_seconds or 0.0), each.ended)
        for each in rounds
        if each.ended
    ]
    for name, spans in bars.items():
        figure.add_bar(
            y=[row for row, *_ in spans],
            x=[(end - begin) / 60 for *_, begin, end in spans],
            base=[(begin - rounds[0].began) / 60 for *_, begin, _ in spans],
            customdata=[number for _, number, *_ in spans],
            hovertemplate="round %{customdata}: %{x:.2f} min",
            name=name,
            orientation="h",
            marker={"color": SPANS.get(name, AVERAGE)},
        )
    return figure


def _losses(rounds: Sequence[Round]) -> Any:
    """Held-out losses: each facility's after its training, and the global model's over them."""
    figure = new_figure("Held-out loss", "round", "loss")
    for facility, colour, parts in _facilities(rounds):
        points = [(part.round, part.losses[-1]) for part in parts if part.losses]
        _line(figure, f"{facility}, trained", points, line={"color": colour, "dash": "dot"})
    ends = [(each.number, each.global_loss) for each in rounds if each.global_loss is not None]
    _line(figure, "global", ends, line={"color": AVERAGE, "width": 3})
    return figure.update_xaxes(dtick=1)


def _by_facility(
    rounds: Sequence[Round], title: str, unit: str, value: Callable[[Part], float]
) -> Any:
    figure = new_figure(title, "round", unit, barmode="stack")
    for facility, colour, parts in _facilities(rounds):
        numbers, values = [part.round for part in parts], [value(part) for part in parts]
        figure.add_bar(x=numbers, y=values, name=facility, marker={"color": colour})
    return figure.update_xaxes(dtick=1)


def _facilities(rounds: Sequence[Round]) -> Iterator[tuple[str, str, list[Part]]]:
    """Each facility's name, its colour, and its part in each round."""
    for position, parts in enumerate(zip(*(each.parts for each in rounds), strict=True)):
        yield parts[0].facility, FACILITIES[position % len(FACILITIES)], list(parts)
