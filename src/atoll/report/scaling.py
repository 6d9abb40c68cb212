"""The figure and the tables of `atoll plan --simulate --json`: how a job scales on paper."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.errors import UserError
from atoll.report.drawing import Curves, Series
from atoll.report.tables import Rows

KINDS = {"weak": "the samples grow with the nodes", "strong": "the same samples a step"}
Line = dict[str, Any]


def read(file: Path) -> dict[str, Any]:
    """What --json printed. Raises `UserError` for anything else."""
    try:
        simulated = dict(json.loads(file.read_text()))
        assert simulated["knee"].keys() == KINDS.keys() and all(simulated[kind] for kind in KINDS)
    except (OSError, ValueError, TypeError, KeyError, AssertionError, AttributeError):
        raise UserError(
            f"{file} holds no simulation", f"atoll plan … --simulate=nodes=16,64 --json > {file}"
        ) from None
    return simulated


def figure(simulated: dict[str, Any]) -> Curves:
    """Efficiency over nodes, weak and strong; dashed: of what lasts, with failures."""
    nodes = [float(row["nodes"]) for row in simulated["weak"]]
    return Curves(
        f"Scaling of {simulated['model']} on {simulated['facility']}",
        "nodes",
        "efficiency",
        [series for at, kind in enumerate(KINDS) for series in _series(kind, at, simulated)],
        log_x=True,
        caption="; ".join(f"{kind}: {samples}" for kind, samples in KINDS.items())
        + "; dashed: of what lasts, with failures.",
        ticks=nodes,
    )


def _series(kind: str, colour: int, simulated: dict[str, Any]) -> Iterator[Series]:
    rows: Sequence[Line] = simulated[kind]
    yield Series(kind, 2 * colour, [(row["nodes"], row["efficiency"]) for row in rows])
    lasting = [(r["nodes"], r["efficiency"] * r["useful"]) for r in rows if r["useful"] is not None]
    if lasting:
        yield Series(f"{kind}, with failures", 2 * colour + 1, lasting, "dashed")


def tables(simulated: dict[str, Any]) -> dict[str, Rows]:
    """Weak and strong, each count's step, what bounds it, and where the knee is."""
    titles = {kind: f"{kind.capitalize()} scaling: {samples}" for kind, samples in KINDS.items()}
    return {
        titles[kind]: [_cells(row, row["nodes"] == simulated["knee"][kind]) for row in rows]
        for kind in KINDS
        for rows in [simulated[kind]]
    }


def _cells(row: Line, is_knee: bool) -> dict[str, str]:
    minutes, useful = row["checkpoint_minutes"], row["useful"]
    return {
        "nodes": f"{row['nodes']}",
        "samples": f"{row['batch_samples']}",
        "s a step": f"{row['step_seconds']:.3g}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "efficiency": f"{row['efficiency']:.0%}",
        "bound by": row["bound"],
        "knee": f"by {row['cause']}" if is_knee else "",
        "save each min": "" if minutes is None else f"{minutes:,.1f}",
        "useful": "" if useful is None else f"{useful:.1%}",
        "strategy": " ".join(row["strategy"]),
    }
