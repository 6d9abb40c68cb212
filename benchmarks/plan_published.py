"""The planner's seconds beside published ones, with their hardware: published.json has both.

    python benchmarks/plan_published.py

Each row is planned twice: at the peak of its devices, which no run passes, and at a share of it.
The share is one number for a kind of device, found so that its first row (`fitted`) comes out as
published; the other rows are judged by it. The table goes into docs/planner.md.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.config.compose import compose, known_shape
from atoll.plan.memory import memory_of
from atoll.plan.seconds import stated_rates, step_seconds
from atoll.settings import Run

ROWS = Path(__file__).with_name("published.json")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
BEGIN = "<!-- plan_published: made by make bench-plan_published -->"
END = "<!-- plan_published: end -->"
LATENCIES = ["facility.node.link_latency_us=3.4", "facility.network.latency_us=14"]
Row = dict[str, Any]


def composed(row: Row, known: dict[str, Any]) -> Run:
    """The run that a row describes, on its hardware."""
    hardware = known["hardware"][row["hardware"]]
    in_node = hardware.get("devices", 8)
    tensor = next((int(w[16:]) for w in row["words"] if w.startswith("sharding.tensor=")), 1)
    samples = in_node * row["nodes"] // tensor * row["microbatch"] * row.get("passes", 1)
    samples = row.get("samples", samples)
    words = [
        *["facility=generic_slurm", "model=llama_tiny", "precision=bf16", "launcher=static"],
        *[f"facility.node.devices={in_node}", f"ranks_per_node={in_node}"],
        *[f"nodes={row['nodes']}", *LATENCIES],
        *hardware["words"],
        *[f"++model.config.{size}" for size in known["models"][row["model"]]],
        *[f"data.sequence_tokens={row['tokens']}", f"training.global_batch_samples={samples}"],
        f"++model.config.max_position_embeddings={row['tokens']}",
        f"training.microbatch_samples={row['microbatch']}",
        f"training.activation_checkpointing={row['recompute']}",
        # the peers' losses keep all logits at once
        f"training.loss_chunk_tokens={row['tokens'] * row['microbatch']}",
        *row["words"],
    ]
    return compose(words).run


def rate(run: Run, peak_share: float) -> float:
    """Tokens in a second of one device, at a share of its peak."""
    rates = stated_rates(run)
    assert rates.device_tflops is not None
    rates = replace(rates, device_tflops=rates.device_tflops * peak_share)
    step = step_seconds(run, known_shape(run), rates).total
    assert step is not None
    return run.training.global_batch_samples * run.data.sequence_tokens / step / run.world_size


def fitted_share(run: Run, published: float) -> float:
    """Of the peak, so that the run comes out as published."""
    low, high = 0.05, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if rate(run, middle) > published else (middle, high)
    return (low + high) / 2


def main() -> int:
    """Write the table; 1 where a published rate is above what the peak allows."""
    known = json.loads(ROWS.read_text())
    runs = [composed(row, known) for row in known["rows"]]
    shares = {
        row["hardware"]: fitted_share(run, row["tokens_per_second"])
        for row, run in zip(known["rows"], runs, strict=True)
        if row.get("fitted")
    }
    lines, errors, faster = list[str](), list[float](), 0
    for row, run in zip(known["rows"], runs, strict=True):
        hardware = known["hardware"][row["hardware"]]
        share = shares[hardware.get("share_of", row["hardware"])]
        most, planned, published = rate(run, 1.0), rate(run, share), row["tokens_per_second"]
        error = None if published is None else planned / published - 1
        if error is not None and not row.get("fitted"):
            errors.append(abs(error))
        faster += published is not None and published > most
        lines.append(_line(row, run, most, planned, error))
    write(lines, errors, shares, known)
    return int(faster > 0)


def _line(row: Row, run: Run, most: float, planned: float, error: float | None) -> str:
    published = row["tokens_per_second"]
    said = "fitted" if row.get("fitted") else "" if error is None else f"{error:+.0%}"
    memory = f"{memory_of(run, known_shape(run)).peak_gib:.0f}"
    if "memory_gib" in row:
        memory += f" ({row['memory_gib']:.0f})"
    about = f"{row['microbatch']} x {row['tokens']}, {row['recompute']}"
    about += f", {row['note']}" if "note" in row else ""
    cells = [row["model"], row["hardware"], str(run.world_size), about]
    cells += ["none" if published is None else f"{published:,.0f}", f"{most:,.0f}"]
    cells += [f"{planned:,.0f}", said, memory, row.get("why", "")]
    return f"| {' | '.join(cells)} |"


def write(
    lines: list[str], errors: list[float], shares: dict[str, float], known: dict[str, Any]
) -> None:
    """Put the table into the page, with its sources."""
    each = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
    text = [
        f"Tokens/s of a device. {len(errors)} rows judged: median error "
        f"{statistics.median(errors):.0%}, worst {max(errors):.0%}. Shares of the peak: {each}.",
        "",
        "| model | devices | number | microbatch, recompute | published | at peak | planned "
        "| error | GiB planned (published) | likely why |",
        f"|{'---|' * 10}",
        *lines,
        "",
        *[f"- {name}: {hardware['source']}." for name, hardware in known["hardware"].items()],
    ]
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *text, END + rest.split(END)[1]]))
    print("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
