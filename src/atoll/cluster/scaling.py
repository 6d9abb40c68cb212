"""`atoll plan --simulate=nodes=…`: how a job scales over a facility's nodes, weak and strong."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from atoll.config import certificate
from atoll.config.compose import config_tree, known_shape, shardings
from atoll.errors import UserError
from atoll.plan.memory import why_unknown
from atoll.plan.prediction import checkpoint_bytes
from atoll.plan.shapes import Shape
from atoll.plan.simulate import (
    KNEE,
    RESTART_SECONDS,
    Scaled,
    chosen_price,
    knee,
    simulated,
    stated_price,
)
from atoll.settings import Run
from atoll.tables import table

GRAMMAR = "as nodes=16,64,256 or nodes=16,64,...,4096"
COLUMNS = [
    *["nodes", "samples", "s a step", "tokens/s", "efficiency", "bound by", "save each min"],
    *["useful", "effective tokens/s", "strategy"],
]


def simulate(run: Run, words: str, stated: bool, as_json: bool, typed: Sequence[str] = ()) -> int:
    """Print both tables and their knees; `stated`: keep the run's own strategy at every count.

    typed: words of the command line, whose axes and microbatch stay where a layout is chosen.
    """
    counts = counts_of(words)
    shape = known_shape(run)
    rates = certificate.rates(run)
    chosen = chosen_price(shape, shardings(config_tree()), rates, typed)
    price = stated_price(shape, rates) if stated else chosen
    save = save_seconds(run, shape)
    kinds = {
        name: simulated(run, counts, weak, price, save)
        for name, weak in (("weak", True), ("strong", False))
    }
    if as_json:
        found = {name: [asdict(row) for row in rows] for name, rows in kinds.items()}
        knees = {name: (row := knee(rows)) and row.nodes for name, rows in kinds.items()}
        about = {"facility": run.facility.name, "model": run.model.name, "knee": knees}
        print(json.dumps(about | found, indent=1))
        return 0
    for name, rows in kinds.items():
        print(f"{name} scaling of {run.model.name} on {run.facility.name}{BATCHES[name]}")
        print(table(COLUMNS, [_row(row) for row in rows]))
        print(f"{knee_line(rows)}\n")
    print(failures_line(run, save))
    return 0


BATCHES = {"weak": ": samples grow with the nodes", "strong": ": the same samples a step"}


def counts_of(words: str) -> list[int]:
    """The node counts of `nodes=16,64,...,4096`: dots go on by the last factor.

    Raises `UserError` for anything else.
    """
    name, _, text = words.partition("=")
    parts = text.split(",")
    try:
        if name != "nodes":
            raise ValueError
        if "..." in parts:
            first, second, _, last = parts
            counts, factor = [int(first)], int(second) // int(first)
            if factor < 2 or int(second) % int(first):
                raise ValueError
            while counts[-1] * factor <= int(last):
                counts.append(counts[-1] * factor)
            counts += [] if counts[-1] == int(last) else [int(last)]
        else:
            counts = [int(part) for part in parts]
        if min(counts) < 1 or counts != sorted(set(counts)):
            raise ValueError
    except (ValueError, ZeroDivisionError):
        raise UserError(f"--simulate {words} names no counts of nodes", f"{GRAMMAR}") from None
    return counts


def save_seconds(run: Run, shape: Shape) -> float | None:
    """What one node alone would need to write a checkpoint; None: not known."""
    rate = certificate.file_write_gb_s(run)
    if rate is None or why_unknown(run, shape):
        return None
    return checkpoint_bytes(run, shape) / (rate * 1e9)


def knee_line(rows: Sequence[Scaled]) -> str:
    found = knee(rows)
    if found is None:
        return f"knee: none up to {rows[-1].nodes} nodes, efficiency stays at {KNEE:.0%} or above"
    return f"knee: {found.nodes} nodes, efficiency {found.efficiency:.0%}, by {found.cause}"


def failures_line(run: Run, save: float | None) -> str:
    if save is None:
        return "with failures: unknown until facility.node.file_write_gb_s is stated or measured"
    rate = run.restart.failures_per_node_day
    return (
        f"with failures: {rate:g} a node and day, {RESTART_SECONDS:g} s until training goes on, "
        f"a save of {save:,.1f} s by one node alone, during which training stands still"
    )


def _row(row: Scaled) -> list[str]:
    useful, effective = row.useful, row.effective_tokens_per_second
    return [
        f"{row.nodes}",
        f"{row.batch_samples}",
        f"{row.step_seconds:,.3g}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.efficiency:.0%}",
        row.bound,
        "?" if row.checkpoint_minutes is None else f"{row.checkpoint_minutes:,.1f}",
        "?" if useful is None else f"{useful:.1%}",
        "?" if effective is None else f"{effective:,.0f}",
        " ".join(row.strategy),
    ]
