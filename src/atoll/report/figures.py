"""The figures of runs and of campaigns."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from atoll.cluster.record import MEASURED
from atoll.plan.traffic import total
from atoll.report.campaign import Part, Round, spent
from atoll.report.drawing import Bars, Curves, Figure, Point, Series, Span
from atoll.report.results import is_scaling_series, labels
from atoll.report.run import Record, RunMetrics
from atoll.report.sources import source_losses
from atoll.settings.exchange import GOODPUT_COLUMNS

# What a facility does in a round, in this order, and the average; each with its colour.
SPANS = {"send": 5, "queue": 6, "train": 0, "fetch": 4, "average": 3}
AVERAGE = SPANS["average"]
SPENT = {name: colour for colour, name in enumerate(GOODPUT_COLUMNS)}


def of_runs(runs: Sequence[RunMetrics]) -> Iterator[Figure]:
    """Loss, perplexity and rates of each run; scaling where they are one job at several sizes."""
    yield _curves(runs, "Training loss", "tokens", "loss", "loss", log=True)
    yield _curves(runs, "Training loss over time", "minutes", "loss", "loss", log=True)
    records = [line for run in runs for line in run.evaluations]
    quality = "perplexity" if all("perplexity" in line for line in records) else "loss"
    for title, x in (
        (f"Held-out {quality}", "tokens"),
        (f"Held-out {quality} over time", "minutes"),
    ):
        yield _curves(runs, title, x, quality, quality, _evaluations, log=True)
    if len(runs) == 1 and runs[0].settings.data.sources:
        yield source_losses(runs[0])
    yield _curves(runs, "Throughput", "step", "tokens/s", "tokens_per_second")
    yield _curves(runs, "Model FLOP utilisation", "step", "share of peak", "mfu")
    yield _curves(runs, "Memory of a rank", "step", "GiB", "memory_gib")
    if any(run.checkpoints for run in runs):
        yield _checkpoints(runs)
    predicted = _predicted(runs)
    if predicted.series:
        yield predicted
    if any(run.communication for run in runs):
        yield _communication(runs)
    names = labels(runs)
    yield _goodput({names[run.folder]: run.goodput for run in runs if run.goodput})
    if is_scaling_series(runs):
        yield _scaling(runs)


def legend(runs: Sequence[RunMetrics]) -> dict[str, int]:
    """Each run's name on the page, and its colour in all figures."""
    names = labels(runs)
    return {names[run.folder]: position for position, run in enumerate(runs)}


def _training(run: RunMetrics) -> list[Record]:
    return run.train


def _evaluations(run: RunMetrics) -> list[Record]:
    """With the tokens that were trained on before each: between two lines as they follow."""
    known = sorted(({0: 0} | {line["step"]: line["tokens"] for line in run.train}).items())
    stepped = [line for line in run.evaluations if line.get("step") is not None]
    return [
        line | {"tokens": _tokens_at(line["step"], known)}
        for line in stepped
        if line["step"] <= known[-1][0]
    ]


def _tokens_at(step: int, known: Sequence[tuple[int, int]]) -> float:
    at = bisect_left(known, (step, 0))
    after, tokens = known[at]
    if after == step:
        return tokens
    before, fewer = known[at - 1]
    return fewer + (tokens - fewer) * (step - before) / (after - before)


def _curves(
    runs: Sequence[RunMetrics],
    title: str,
    x: str,
    unit: str,
    key: str,
    records: Callable[[RunMetrics], list[Record]] = _training,
    log: bool = False,
) -> Curves:
    """A line for each run, of the records that have both values."""
    series = []
    for name, (colour, run) in zip(legend(runs), enumerate(runs), strict=True):
        pairs = ((_position(run, line, x), line.get(key)) for line in records(run))
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        series.append(Series(name, colour, known, key=name))
    return Curves(title, x, unit, series, log_y=log)


def _position(run: RunMetrics, line: Record, x: str) -> float | None:
    if x == "minutes" and "time" in line:
        return float(line["time"] - run.start["time"]) / 60
    return line.get(x)


def _checkpoints(runs: Sequence[RunMetrics]) -> Curves:
    """Until each was complete, and how long training stood still for it."""
    series = []
    for name, (colour, run) in zip(legend(runs), enumerate(runs), strict=True):
        for ending, key, style in (
            (", saved", "save", "points"),
            (", blocked", "blocked", "rings"),
        ):
            points = [(line["step"], line[f"{key}_seconds"]) for line in run.checkpoints]
            series.append(Series(name + ending, colour, points, style, name))
    caption = "Filled: until it was complete. Open: how long training stood still for it."
    return Curves("Checkpoints", "step", "seconds", series, log_y=True, caption=caption)


def _predicted(runs: Sequence[RunMetrics]) -> Curves:
    """What was measured against what was predicted, a point for each run and figure."""
    points: dict[str, list[Point]] = {}
    for outcome in (outcome for run in runs for outcome in run.outcomes):
        if outcome.predicted and outcome.measured:
            pair = (outcome.predicted, outcome.measured)
            points.setdefault(outcome.name, []).append(pair)
    places = {name: place for place, name in enumerate(MEASURED)}
    series = [
        Series(
            f"{MEASURED[name].what}, {MEASURED[name].unit}", places[name], sorted(each), "points"
        )
        for name, each in points.items()
    ]
    ends = sorted(x for each in points.values() for point in each for x in point)
    if ends:
        line = [(ends[0], ends[0]), (ends[-1], ends[-1])]
        series.append(Series("as predicted", len(places), line, "dashed"))
    caption = "Each in its own unit. At stated peaks a time is the least: its points lie above."
    return Curves("Predicted and measured", "predicted", "measured", series, True, True, caption)


def _communication(runs: Sequence[RunMetrics]) -> Bars:
    spans, names = [], labels(runs)
    for run in runs:
        for profile in run.communication[-1:]:
            expected = (total(profile["expected_bytes"]) or 0) / 2**20
            sizes = {"expected": expected, "on the wire": profile["wire_bytes"] / 2**20}
            of_run = f", {names[run.folder]}" if len(runs) > 1 else ""
            spans += [Span(f"{kind}{of_run}", kind, 0.0, size) for kind, size in sizes.items()]
    colours = {"expected": 0, "on the wire": 1}
    return Bars("Communication per rank and step", "MiB", spans, colours)


def _goodput(spent: Mapping[str, Mapping[str, float]]) -> Bars:
    """What became of each node-minute, a bar for each run or facility."""
    spans = []
    for row, columns in spent.items():
        at = 0.0
        for name in GOODPUT_COLUMNS:
            minutes = columns.get(name, 0.0) / 60
            if minutes:
                spans.append(Span(row, name, at, at + minutes))
            at += minutes
    return Bars("Goodput", "node-minutes", spans, SPENT)


def _scaling(runs: Sequence[RunMetrics]) -> Curves:
    """Tokens per second against devices, and the line of a perfect speed-up over the smallest."""
    devices, rates = [run.devices for run in runs], [run.tokens_per_second for run in runs]
    ideal = [rates[0] * count / devices[0] for count in devices]
    series = [
        Series("observed", 0, list(zip(map(float, devices), rates, strict=True))),
        Series("ideal", 6, list(zip(map(float, devices), ideal, strict=True)), "dashed"),
    ]
    ticks = sorted(set(devices))
    return Curves("Scaling", "devices", "tokens/s", series, log_x=True, log_y=True, ticks=ticks)


def of_campaign(rounds: Sequence[Round]) -> Iterator[Figure]:
    """Who was at what when; losses, bytes and weights, round by round."""
    yield _timeline(rounds)
    yield _goodput(spent(rounds))
    yield _losses(rounds)
    yield _by_facility(
        rounds, "Bytes in a round", "MiB", lambda p: (p.sent_bytes + p.received_bytes) / 2**20
    )
    yield _by_facility(rounds, "Weight in the round's model", "share", lambda p: p.weight or 0)


def facility_colours(rounds: Sequence[Round]) -> dict[str, int]:
    """Each facility's colour; the global model has one of its own."""
    free = [colour for colour in range(10) if colour != AVERAGE]
    names = dict.fromkeys(part.facility for each in rounds for part in each.parts)
    return {name: free[position % len(free)] for position, name in enumerate(names)}


def _timeline(rounds: Sequence[Round]) -> Bars:
    began = rounds[0].began

    def span(row: str, name: str, begin: float, end: float, number: int) -> Span:
        return Span(row, name, (begin - began) / 60, (end - began) / 60, f"min, round {number}")

    parts = [part for each in rounds for part in each.parts]
    spans = [
        span(part.facility, name, *part.spans[name], part.round)
        for part in parts
        for name in SPANS
        if name in part.spans
    ]
    spans += [
        span(
            "average",
            "average",
            each.ended - (each.average_seconds or 0.0),
            each.ended,
            each.number,
        )
        for each in rounds
        if each.ended
    ]
    return Bars("Timeline", "minutes", spans, SPANS)


def _losses(rounds: Sequence[Round]) -> Curves:
    """Held-out losses: each facility's after its training, and the global model's over them."""
    series = []
    for facility, colour in facility_colours(rounds).items():
        parts = [part for each in rounds for part in each.parts if part.facility == facility]
        points: list[Point] = [(part.round, part.losses[-1]) for part in parts if part.losses]
        series.append(Series(f"{facility}, trained", colour, points, "dashed", facility))
    ends = [(each.number, each.global_loss) for each in rounds if each.global_loss is not None]
    series.append(Series("global", AVERAGE, ends, key="global"))
    numbers = [each.number for each in rounds]
    return Curves("Held-out loss", "round", "loss", series, log_y=True, ticks=numbers)


def _by_facility(
    rounds: Sequence[Round], title: str, unit: str, value: Callable[[Part], float]
) -> Bars:
    spans = []
    for each in rounds:
        at = 0.0
        for part in each.parts:
            size = value(part)
            spans += [Span(f"round {each.number}", part.facility, at, at + size)] if size else []
            at += size
    return Bars(title, unit, spans, facility_colours(rounds))
