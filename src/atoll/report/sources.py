"""How each of several sources was read and learned: a table, and a figure of held-out losses."""

from atoll.report.drawing import Curves, Series
from atoll.report.run import RunMetrics
from atoll.report.tables import Rows, number


def source_rows(run: RunMetrics) -> Rows:
    """Of each source its weights, how often it was read, and its held-out loss; none of one."""
    last = run.train[-1]
    rows = []
    for source in run.settings.data.sources:
        losses = [f"{value:.4f}" for _, value in _losses(run, source.name)]
        weights = ", ".join(f"{w:g} from {step}" for step, w in source.weights.items())
        rows.append(
            {
                "run": run.name,
                "source": source.name,
                "weight": weights if len(source.weights) > 1 else f"{source.weights[0]:g}",
                "epochs": number(last.get(f"epochs/{source.name}"), 3),
                "held-out loss": " → ".join((*losses[:1], *losses[1:][-1:])),
            }
        )
    return rows


def source_losses(run: RunMetrics) -> Curves:
    """The held-out loss of each source of a run over the steps."""
    series = [
        Series(source.name, colour, _losses(run, source.name))
        for colour, source in enumerate(run.settings.data.sources)
    ]
    return Curves("Held-out loss of each source", "step", "loss", series, log_y=True)


def _losses(run: RunMetrics, source: str) -> list[tuple[float, float]]:
    name = f"loss/{source}"
    return [(line["step"], line[name]) for line in run.evaluations if line.get(name) is not None]
