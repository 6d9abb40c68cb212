"""The line before a run against the run: what a new user of this machine reads, and gets.

    python benchmarks/plan_line.py [--rounds 2] [--calibration FILE] [--table] [--check]

In an empty folder: `atoll plan --measure facility=laptop`, then small runs of three shapes in
turns, each submitted as a user does. The line that submit says is held against the median step,
the memory and the node-hours behind it. The first line rests on measured rates alone, later ones
also on what the runs before them taught. Rows go to results/plan_line.jsonl, and from there into
docs/planner.md.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results
from plan_memory import text_to_learn
from plan_time import PAGE, SHAPES

from atoll import run_dir
from atoll.cluster.record import outcomes

LIMIT = 0.10
BEGIN, END = "<!-- plan_line: made by make bench-plan_line -->", "<!-- plan_line: end -->"
FIGURES = ("step_seconds", "memory_gib", "node_hours")
STEPS = {"tiny": 96, "wide": 96, "gpt2": 40}  # a minute each
TEXT = ("data=python_stdlib",)
WORDS = [
    *["facility=laptop", "sharding=ddp", "precision=fp32", "override=[fit]", "data.workers=1"],
    *["data=text_files", "tokenizer.vocabulary_tokens=2048", "evaluation.max_samples=1"],
    *["training.log_every_steps=1", "checkpoint.every_steps=0"],
    *["training.global_batch_samples=8", "training.microbatch_samples=4"],
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calibration", type=Path, help="a certificate that --measure wrote")
    parser.add_argument("--table", action="store_true", help="only write the page's table")
    parser.add_argument("--check", action="store_true", help="fail where a later line is off")
    arguments = parser.parse_args()
    if not arguments.table:
        keep(measured_rows(arguments.rounds, arguments.calibration))
    return int(not write_table() and arguments.check)


def measured_rows(rounds: int, calibration: Path | None) -> list[dict[str, Any]]:
    rows = []
    with text_to_learn() as text, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if calibration is None:
            atoll(folder, "plan", "--measure", "facility=laptop", "model=llama_tiny", *TEXT)
        else:
            (folder / "facilities").mkdir()
            shutil.copy(calibration, folder / "facilities" / "laptop.json")
        for turn in range(1, rounds + 1):
            for shape in STEPS:
                rows.append(row(folder, text, shape, turn))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def row(folder: Path, text: Path, shape: str, turn: int) -> dict[str, Any]:
    """One run from its line to its end."""
    name = f"{shape}-{turn}"
    words = [f"name={name}", f"training.steps={STEPS[shape]}"]
    words += [f"data.files=[{text}/text.txt]", f"folders.prepared={text}/prepared"]
    said = atoll(folder, "submit", *WORDS, *SHAPES[shape], *words)
    line = next(each for each in said.splitlines() if each.startswith(f"{name}: "))
    run_folder = folder / "runs" / name
    kept = json.loads(run_dir.prediction_file(run_folder).read_text())
    each = {one.name: one for one in outcomes(run_folder) if one.error is not None}
    figures = {
        figure: {"predicted": each[figure].predicted, "measured": each[figure].measured}
        for figure in FIGURES
    }
    return {"case": shape, "round": turn, "line": line, "runs": kept["runs"], "figures": figures}


def atoll(folder: Path, *words: str) -> str:
    """What a command says on stderr; its failure ends this."""
    command = [sys.executable, "-m", "atoll", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stderr


def error(row: Mapping[str, Any], figure: str) -> float:
    value = row["figures"][figure]
    return float(value["predicted"] / value["measured"] - 1)


def keep(rows: Sequence[dict[str, Any]]) -> None:
    about = {"benchmark": "plan_line", "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about |= {"machine": results.machine(), "versions": results.versions()}
    with open(results.FOLDER / "plan_line.jsonl", "a") as file:
        for each in rows:
            file.write(json.dumps(about | each) + "\n")
    later = [row for row in rows if row["runs"]]
    worst = [max(abs(error(row, figure)) for row in later) for figure in FIGURES] if later else []
    held = [
        results.row(
            f"worst error of {figure}, taught by runs", "", [value], "limit", [LIMIT], "lower", 1.0
        )
        for figure, value in zip(FIGURES, worst, strict=False)
    ]
    results.record("plan_line", held)


def write_table() -> bool:
    """Put the newest rows into the page; whether every line that runs taught is within 10 %."""
    lines = (results.FOLDER / "plan_line.jsonl").read_text().splitlines()
    rows = list(
        {(r["case"], r["round"]): r for r in map(json.loads, lines) if "line" in r}.values()
    )
    rows = [row for row in rows if row["figures"].keys() >= set(FIGURES)]
    if not rows:
        raise SystemExit("no run was measured with all figures: leave --table out")
    rows.sort(key=lambda each: each["round"])
    heads = [f"{each} | took | error" for each in ("step, s", "memory, GiB", "node-hours")]
    shown = [f"| run | line rests on | {' | '.join(heads)} |", "|---|---|" + "---|" * 9]
    for each in rows:
        rests = f"{each['runs']} runs" if each["runs"] else "measured rates"
        cells = [
            f"{value['predicted']:.3g} | {value['measured']:.3g} | {error(each, figure):+.1%}"
            for figure, value in each["figures"].items()
        ]
        shown.append(f"| {each['case']} | {rests} | {' | '.join(cells)} |")
    spread = {
        kind: statistics.median(abs(error(row, "step_seconds")) for row in own)
        for kind, own in (
            ("measured rates", [row for row in rows if not row["runs"]]),
            ("runs", [row for row in rows if row["runs"]]),
        )
        if own
    }
    medians = ", ".join(f"{value:.1%} by {kind}" for kind, value in spread.items())
    about = f"{len(rows)} runs, {rows[-1]['date']}: median error of a step {medians}."
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, about, "", *shown, END + rest.split(END)[1]]))
    later = [row for row in rows if row["runs"]]
    return all(abs(error(row, figure)) <= LIMIT for row in later for figure in FIGURES)


if __name__ == "__main__":
    sys.exit(main())
