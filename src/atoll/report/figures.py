"""The figures of runs and of campaigns."""

from collections.abc import Iterator, Sequence
from typing import Any

from atoll.report.campaign import Round
from atoll.report.html import COLOURS, figure, graph_objects
from atoll.report.run import RunMetrics

# What a facility does in a round, in this order, each with its colour.
SPANS = {"send": COLOURS[5], "queue": COLOURS[6], "train": COLOURS[0], "fetch": COLOURS[4]}
AVERAGE = COLOURS[3]
FACILITIES = tuple(colour for colour in COLOURS if colour != AVERAGE)


def of_runs(told: Sequence[RunMetrics]) -> Iterator[Any]:
    """Loss, perplexity and rates of each run; scaling where they have different sizes."""
    yield _lines(told, "Training loss", "tokens", "loss", "tokens", "loss")
    yield _lines(told, "Training loss over time", "minutes", "loss", "minutes", "loss")
    yield _held_out(told, "tokens")
    yield _held_out(told, "minutes")
    yield _lines(told, "Throughput", "step", "tokens/s", "step", "tokens_per_second")
    yield _lines(told, "Model FLOP utilisation", "step", "share of peak", "step", "mfu")
    yield _lines(told, "Memory of a rank", "step", "GiB", "step", "memory_gib")
    if any(one.checkpoints for one in told):
        yield _checkpoints(told)
    if any(one.communication for one in told):
        yield _communication(told)
    if len({one.devices for one in told}) > 1:
        yield _scaling(told)


def _lines(told: Sequence[RunMetrics], title: str, x: str, y: str, across: str, up: str) -> Any:
    made, go = figure(title, x, y), graph_objects()
    for one in told:
        known = "time" if across == "minutes" else across
        lines = [x for x in one.train if x.get(up) is not None and x.get(known) is not None]
        points = [_across(one, line, across) for line in lines]
        values = [line[up] for line in lines]
        made.add_trace(go.Scatter(x=points, y=values, name=one.run.name, mode="lines+markers"))
        made.update_traces(marker={"size": 4})
    return made


def _across(one: RunMetrics, line: dict[str, Any], name: str) -> float:
    if name == "minutes":
        return float(line["time"] - one.start["time"]) / 60
    return float(line[name])


def _held_out(told: Sequence[RunMetrics], across: str) -> Any:
    """Perplexity for a language model; the loss where a run has none."""
    name = "perplexity" if all("perplexity" in e for one in told for e in one.held_out) else "loss"
    over = " over time" if across == "minutes" else ""
    made, go = figure(f"Held-out {name}{over}", across, name), graph_objects()
    for one in told:
        tokens = {line["step"]: line["tokens"] for line in one.train} | {0: 0}
        lines = [e | {"tokens": tokens.get(e["step"])} for e in one.held_out]
        known = [e for e in lines if e["tokens"] is not None]
        points, values = [_across(one, e, across) for e in known], [e[name] for e in known]
        made.add_trace(go.Scatter(x=points, y=values, name=one.run.name, mode="lines+markers"))
    return made


def _checkpoints(told: Sequence[RunMetrics]) -> Any:
    """Until each was whole, and how long training stood still for it."""
    made, go = figure("Checkpoints", "step", "seconds"), graph_objects()
    for number, one in enumerate(told):
        colour = COLOURS[number % len(COLOURS)]
        for name, key, symbol in (("saved", "save", "circle"), ("held", "blocked", "x")):
            steps = [line["step"] for line in one.checkpoints]
            values = [line[f"{key}_seconds"] for line in one.checkpoints]
            marker = {"color": colour, "symbol": symbol, "size": 8}
            label = f"{one.run.name}, {name}"
            made.add_trace(go.Scatter(x=steps, y=values, name=label, mode="markers", marker=marker))
    made.update_yaxes(type="log")
    return made


def _communication(told: Sequence[RunMetrics]) -> Any:
    made, go = figure("Sent by a rank in a step", "", "MiB", barmode="group"), graph_objects()
    seen = [(one.run.name, one.communication[-1]) for one in told if one.communication]
    names = [name for name, _ in seen]
    expected = [sum(line["expected_bytes"].values()) / 2**20 for _, line in seen]
    wire = [line["wire_bytes"] / 2**20 for _, line in seen]
    made.add_trace(go.Bar(x=names, y=expected, name="expected"))
    made.add_trace(go.Bar(x=names, y=wire, name="observed on the wire"))
    return made


def _scaling(told: Sequence[RunMetrics]) -> Any:
    """Tokens per second against devices, and the line of a perfect speed-up over the smallest."""
    made, go = figure("Scaling", "devices", "tokens/s"), graph_objects()
    devices, rates = [one.devices for one in told], [one.tokens_per_second for one in told]
    ideal = [rates[0] * count / devices[0] for count in devices]
    made.add_trace(go.Scatter(x=devices, y=rates, name="observed", mode="lines+markers"))
    made.add_trace(go.Scatter(x=devices, y=ideal, name="ideal", line={"dash": "dot"}))
    made.update_xaxes(type="log", tickvals=devices)
    made.update_yaxes(type="log")
    return made


def of_campaign(found: Sequence[Round]) -> Iterator[Any]:
    """Who was at what when; losses, bytes and weights, round by round."""
    yield _timeline(found)
    yield _losses(found)
    yield _by_facility(found, "Bytes in a round", "MiB", _mebibytes)
    yield _by_facility(found, "Weight in the round's model", "share", lambda part: part.weight or 0)


def _mebibytes(part: Any) -> float:
    return float(part.sent_bytes + part.received_bytes) / 2**20


def _timeline(found: Sequence[Round]) -> Any:
    made, go = figure("Timeline", "minutes", "", barmode="overlay"), graph_objects()
    began = found[0].began
    for name, colour in SPANS.items():
        spans = [
            (p.facility, p.round, *p.spans[name])
            for one in found
            for p in one.parts
            if name in p.spans
        ]
        made.add_trace(
            go.Bar(
                y=[facility for facility, *_ in spans],
                x=[(end - begin) / 60 for *_, begin, end in spans],
                base=[(begin - began) / 60 for *_, begin, _ in spans],
                customdata=[number for _, number, *_ in spans],
                hovertemplate="round %{customdata}: %{x:.2f} min",
                name=name,
                orientation="h",
                marker={"color": colour},
            )
        )
    ends = [(one.ended, one.average_seconds or 0.0, one.number) for one in found if one.ended]
    made.add_trace(
        go.Bar(
            y=["average" for _ in ends],
            x=[seconds / 60 for _, seconds, _ in ends],
            base=[(end - seconds - began) / 60 for end, seconds, _ in ends],
            customdata=[number for *_, number in ends],
            hovertemplate="round %{customdata}: %{x:.2f} min",
            name="average",
            orientation="h",
            marker={"color": AVERAGE},
        )
    )
    return made


def _losses(found: Sequence[Round]) -> Any:
    """Held-out losses: each facility's after its training, and the global model's over them."""
    made, go = figure("Held-out loss", "round", "loss"), graph_objects()
    for number, facility in enumerate(part.facility for part in found[0].parts):
        parts = [p for one in found for p in one.parts if p.facility == facility and p.losses]
        made.add_trace(
            go.Scatter(
                x=[p.round for p in parts],
                y=[p.losses[-1] for p in parts],
                name=f"{facility}, trained",
                mode="lines+markers",
                line={"color": FACILITIES[number % len(FACILITIES)], "dash": "dot"},
            )
        )
    ends = [one for one in found if one.global_loss is not None]
    points, values = [one.number for one in ends], [one.global_loss for one in ends]
    line = {"color": AVERAGE, "width": 3}
    made.add_trace(go.Scatter(x=points, y=values, name="global", mode="lines+markers", line=line))
    made.update_xaxes(dtick=1)
    return made


def _by_facility(found: Sequence[Round], title: str, unit: str, value: Any) -> Any:
    made, go = figure(title, "round", unit, barmode="stack"), graph_objects()
    for number, facility in enumerate(part.facility for part in found[0].parts):
        parts = [p for one in found for p in one.parts if p.facility == facility]
        points, values = [p.round for p in parts], [value(p) for p in parts]
        marker = {"color": FACILITIES[number % len(FACILITIES)]}
        made.add_trace(go.Bar(x=points, y=values, name=facility, marker=marker))
    made.update_xaxes(dtick=1)
    return made
