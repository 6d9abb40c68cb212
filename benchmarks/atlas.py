"""Held-out loss against bytes sent, of every server step, encoding and length of a round.

    python benchmarks/atlas.py [--quick] [--minutes 480] [--processes 2] [--report]
    python benchmarks/atlas.py --device cuda [--minutes 55]     all combinations, on one GPU

A small Llama of bytes learns at 2 to 8 facilities, simulated in one process with the product's own
arithmetic (atlas_rounds.py), and beside each a synchronous run of as many tokens. Every campaign is
kept as a line of results/atlas.jsonl as soon as it is done, and never done again: stop it whenever
you like. What tells most comes first. The report goes into docs/atlas.md.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import atlas_report
import atlas_texts
import results
import torch
from atlas_report import DEVICE
from atlas_rounds import SYNCHRONOUS, Cell, run_cell
from atlas_together import run_together

KEPT = results.FOLDER / "atlas.jsonl"
QUICK_STEPS, NIGHT_STEPS = 500, 2000
QUICK_MINUTES, NIGHT_MINUTES = 55.0, 600.0
ROUND_LENGTHS = (10, 25, 50, 100, 250)
# steps of a round that sends, in int4, a twentieth of what a synchronous run does, or a hundredth
SHORT, HUNDREDTH = 3, 14
CODECS = ("fp32", "bf16", "int8", "int4", "int2", "sparse", "topk")
SPARSE = ("sparse", "topk")
UPDATES = ("replace", "nesterov", "momentum", "adam", "yogi")
SPLITS = ("iid", "by_language")
TUNING_SEED, SEEDS = 0, (1, 2, 3)
RATES = {"adamw": (2e-3, 4e-3, 8e-3, 1e-3), "muon": (8e-3, 4e-3, 16e-3)}
# the server's step -> rates and beta1 that are tried
OUTER = {
    "replace": ((1.0, 0.9), (0.7, 0.9)),
    "nesterov": ((0.7, 0.9), (0.3, 0.9), (0.7, 0.5), (1.0, 0.3)),
    "momentum": ((0.3, 0.9), (0.1, 0.9), (0.7, 0.5)),
    "adam": ((3e-3, 0.9), (1e-2, 0.9), (1e-3, 0.9)),
    "yogi": ((3e-3, 0.9), (1e-2, 0.9), (1e-3, 0.9)),
}
TUNED_LENGTHS = (50, 10, 250)
# fragments, rounds until they are taken, share of a facility's own weights then; each tensor is
# averaged every WHOLE_STEPS
FRAGMENTS = ((1, 0, 0.0), (2, 0, 0.0), (3, 0, 0.0), (2, 1, 0.0), (2, 1, 0.5), (3, 1, 0.5))
WHOLE_STEPS = 48
MODELS = 1632  # of a stack on a GPU: 3 seeds of all that two facilities can do
Row = dict[str, Any]
Stage = Callable[..., Iterator[Cell]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter campaigns, the most telling")
    parser.add_argument("--minutes", type=float, default=None, help="after which none is begun")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--device", default="cpu", help="cuda: many campaigns at once on a GPU")
    parser.add_argument("--models", type=int, default=MODELS, help="that learn at once there")
    parser.add_argument("--texts", type=Path, help="of another machine (atlas_texts.py)")
    parser.add_argument("--report", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    if arguments.texts is not None:
        atlas_texts.take(arguments.texts)
    quick = arguments.quick or arguments.device != "cpu"
    steps = QUICK_STEPS if quick else NIGHT_STEPS
    minutes = arguments.minutes or (QUICK_MINUTES if quick else NIGHT_MINUTES)
    if not arguments.report and arguments.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32, as most train in fp32
        run = partial(run_stacks, models=arguments.models, device=torch.device(arguments.device))
        run_stages(GPU_STAGES, steps, minutes, run, arguments.device)
    elif not arguments.report:
        run = partial(run_all, processes=arguments.processes)
        stages = QUICK_STAGES if arguments.quick else NIGHT_STAGES
        run_stages(stages, steps, minutes, run, "cpu")
    atlas_report.write(kept_rows())
    return 0


def run_stages(
    stages: Sequence[Stage], steps: int, minutes: float, run: Callable[..., float], kind: str
) -> None:
    """Each stage as far as it is not done yet, until the time is over.

    A GPU does again what processors have done, for its own runs to be compared with each other.
    """
    for stage in stages:
        rows = kept_rows()
        known = done(row for row in rows if kind == "cpu" or DEVICE in row)
        minutes -= run([cell for cell in stage(steps, rows) if cell not in known], minutes)
        if minutes <= 0:
            break


def run_stacks(cells: Sequence[Cell], minutes: float, models: int, device: torch.device) -> float:
    """Campaigns of as many facilities at once; the minutes that it took."""
    began, longest = time.monotonic(), 0.0
    for stack in stacked(dict.fromkeys(cells), models):
        if _minutes_since(began) + longest > minutes:
            break
        since = time.monotonic()
        full = len(stack) * stack[0].facilities > models // 2  # else compiling takes longer
        outcomes = run_together(stack, device, compiled=full)
        longest = max(longest, _minutes_since(since))
        seconds = round((time.monotonic() - since) / len(stack), 3)
        where = {DEVICE: results.device_name(device), "device_seconds": seconds}
        for cell, outcome in zip(stack, outcomes, strict=True):
            keep(cell, outcome | where, 0)
        print(f"{len(stack)} campaigns in {60 * _minutes_since(since):.0f} s", flush=True)
    return _minutes_since(began)


def stacked(cells: Iterable[Cell], models: int) -> Iterator[list[Cell]]:
    """Cells of as many facilities, in the order they are asked for, in stacks as even as may be."""
    of_count: dict[int, list[Cell]] = {}
    for cell in cells:
        of_count.setdefault(cell.facilities, []).append(cell)
    for count, alike in of_count.items():
        stacks = -(-len(alike) * count // models)
        size = -(-len(alike) // stacks)
        yield from (alike[first : first + size] for first in range(0, len(alike), size))


def run_all(cells: Sequence[Cell], minutes: float, processes: int) -> float:
    """Run cells until the time is over, each kept as it ends; the minutes that it took."""
    began, waiting = time.monotonic(), list(dict.fromkeys(cells))[::-1]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, torch.set_num_threads, (1,)) as pool:
        running: dict[Future[Row], Cell] = {}
        while waiting or running:
            while waiting and len(running) < processes and _minutes_since(began) < minutes:
                cell = waiting.pop()
                running[pool.submit(timed, cell)] = cell
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                keep(running.pop(future), future.result(), len(waiting))
    return _minutes_since(began)


def _minutes_since(began: float) -> float:
    return (time.monotonic() - began) / 60


def timed(cell: Cell) -> Row:
    began = time.process_time()
    return run_cell(cell) | {"processor_seconds": round(time.process_time() - began, 1)}


def keep(cell: Cell, outcome: Row, waiting: int) -> None:
    """A line of the file, whole or not at all: it is one write."""
    about = {"texts": atlas_texts.digest(), "versions": results.versions()}
    row = {"cell": asdict(cell), **outcome, **about}
    with open(KEPT, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{cell.update} {cell.codec} H={cell.inner_steps} K={cell.facilities} {cell.split} seed "
        f"{cell.seed}: {outcome['test']:.4f} nats, {outcome['answered']:.1%} answered, "
        f"{outcome['bytes'] / 1e6:.2f} MB; {waiting} more",
        flush=True,
    )


def kept_rows() -> list[Row]:
    """Those on the texts of this environment: of others nothing can be compared."""
    lines = KEPT.read_text().splitlines() if KEPT.is_file() else []
    rows = [json.loads(line) for line in lines]
    of_texts = [row for row in rows if row["texts"] == atlas_texts.digest()]
    return [row | {"cell": asdict(Cell(**row["cell"]))} for row in of_texts]


def done(rows: Iterable[Row]) -> set[Cell]:
    return {Cell(**row["cell"]) for row in rows}


# Stages: what is tuned first, then what is compared, the most telling first. Each sees what is
# there already, as the rates of the next follow from it.


def tune_inner(steps: int, rows: Sequence[Row], optimizer: str = "adamw") -> Iterator[Cell]:
    """The optimizer's rate, of the synchronous run: all campaigns with it take it too."""
    for rate in RATES[optimizer]:
        sizes = (1, 4, "iid", TUNING_SEED, steps, rate)
        yield Cell(SYNCHRONOUS, "fp32", *sizes, optimizer=optimizer)


def tune_outer(
    steps: int,
    rows: Sequence[Row],
    updates: Sequence[str],
    lengths: Sequence[int],
    optimizer: str = "adamw",
) -> Iterator[Cell]:
    """The server's rate and momentum, by the length of a round, of updates in fp32."""
    rate = best_rate(steps, rows, optimizer)
    for inner_steps in lengths:
        for update in updates:
            for outer_rate, beta1 in OUTER[update]:
                sizes = (inner_steps, 4, "iid", TUNING_SEED, steps, rate)
                yield Cell(update, "fp32", *sizes, outer_rate, beta1, optimizer=optimizer)


def compare(
    steps: int,
    rows: Sequence[Row],
    seeds: Sequence[int] = SEEDS,
    splits: Sequence[str] = SPLITS,
    facilities: Sequence[int] = (4,),
    updates: Sequence[str] = UPDATES,
    codecs: Sequence[str] = CODECS,
    lengths: Sequence[int] = ROUND_LENGTHS,
    optimizer: str = "adamw",
) -> Iterator[Cell]:
    """Every combination, and the synchronous runs beside them, at the tuned rates."""
    rate = best_rate(steps, rows, optimizer)
    for seed in seeds:
        for split in splits:
            for count in facilities:
                sizes = (1, count, split, seed, steps, rate)
                yield Cell(SYNCHRONOUS, "fp32", *sizes, optimizer=optimizer)
                for codec in codecs:
                    for update in updates if codec not in SPARSE else ("replace",):
                        for inner_steps in lengths:
                            outer = best_outer(steps, rows, update, inner_steps, optimizer)
                            sizes = (inner_steps, count, split, seed, steps, rate)
                            yield Cell(update, codec, *sizes, *outer, optimizer=optimizer)


def in_fragments(
    steps: int,
    rows: Sequence[Row],
    seeds: Sequence[int] = SEEDS,
    splits: Sequence[str] = ("iid",),
    updates: Sequence[str] = ("replace", "nesterov"),
) -> Iterator[Cell]:
    """The same bytes in all, sent in parts and taken late."""
    rate = best_rate(steps, rows)
    for seed in seeds:
        for split in splits:
            yield Cell(SYNCHRONOUS, "fp32", 1, 4, split, seed, steps, rate)
            for update in updates:
                outer = best_outer(steps, rows, update, WHOLE_STEPS)
                for fragments, *late in FRAGMENTS:
                    sizes = (WHOLE_STEPS // fragments, 4, split, seed, steps)
                    yield Cell(update, "int8", *sizes, rate, *outer, fragments, *late)


def best_rate(steps: int, rows: Sequence[Row], optimizer: str = "adamw") -> float:
    tried = _tuning(steps, rows, SYNCHRONOUS, optimizer)
    return float(min(tried, key=_validation)["cell"]["rate"]) if tried else RATES[optimizer][0]


def best_outer(
    steps: int, rows: Sequence[Row], update: str, inner_steps: int, optimizer: str = "adamw"
) -> tuple[float, float]:
    """Of the tried rates the best one, at the length nearest to this; untried, the first."""
    tried = _tuning(steps, rows, update, optimizer)
    if not tried:
        return OUTER[update][0]
    lengths = {row["cell"]["inner_steps"] for row in tried}
    nearest = min(sorted(lengths), key=lambda length: abs(log(length / inner_steps)))
    best = min((r for r in tried if r["cell"]["inner_steps"] == nearest), key=_validation)
    return float(best["cell"]["outer_rate"]), float(best["cell"]["beta1"])


def _tuning(steps: int, rows: Sequence[Row], update: str, optimizer: str = "adamw") -> list[Row]:
    wanted = {"update": update, "steps": steps, "seed": TUNING_SEED, "optimizer": optimizer}
    return [row for row in rows if wanted.items() <= row["cell"].items()]


def _validation(row: Row) -> float:
    return float(row["validation"])


FEW_CODECS, FEW_UPDATES = ("fp32", "int8", "int4", "sparse"), ("replace", "nesterov")
FEW_INT4 = partial(compare, seeds=(1,), splits=("iid",), updates=FEW_UPDATES, codecs=("int4",))
WITH_MUON = (
    partial(tune_inner, optimizer="muon"),
    partial(tune_outer, updates=("nesterov",), lengths=(10, 50), optimizer="muon"),
    partial(FEW_INT4, lengths=(SHORT, 10, 50), optimizer="muon"),
    partial(FEW_INT4, lengths=(SHORT, HUNDREDTH), facilities=(4, 2), optimizer="muon"),
    partial(FEW_INT4, lengths=(SHORT, HUNDREDTH)),
    partial(compare, seeds=(1,), updates=("replace",), codecs=("int4",), optimizer="muon"),
    partial(compare, updates=("replace",), codecs=("int4",), lengths=(10, 50), optimizer="muon"),
)
QUICK_STAGES = (
    tune_inner,
    partial(tune_outer, updates=("nesterov",), lengths=(50,)),
    partial(compare, seeds=(1,), splits=("iid",), updates=("replace",), codecs=("fp32", "int8")),
    partial(compare, seeds=(1,), splits=("iid",), updates=("nesterov",), codecs=("fp32",)),
    partial(compare, seeds=(1,), updates=("replace",), codecs=("int8", "int4"), lengths=(10, 50)),
    partial(compare, seeds=(1,), updates=("replace",), codecs=("int2", "sparse"), lengths=(10, 50)),
    partial(in_fragments, seeds=(1,)),
    partial(compare, splits=("iid",), updates=("replace",), codecs=("int8",), lengths=(10, 50)),
    partial(compare, updates=("replace",), codecs=("int8",), lengths=(10, 50)),
    partial(
        compare,
        seeds=(1,),
        facilities=(2, 8),
        updates=("replace",),
        codecs=("int8", "int4"),
        lengths=(10, 50),
    ),
    partial(in_fragments, updates=("replace",)),
    partial(tune_outer, updates=("momentum", "adam", "yogi"), lengths=(50,)),
    partial(compare, seeds=(1,), splits=("iid",), codecs=("int4",)),
    partial(compare, updates=FEW_UPDATES, codecs=("int4",), lengths=(10, 50)),
    *WITH_MUON,
    partial(compare, seeds=(1,), updates=FEW_UPDATES),
    partial(compare, seeds=(1,), splits=("iid",)),
    partial(compare, updates=FEW_UPDATES),
    compare,
)
NIGHT_STAGES = (
    tune_inner,
    partial(tune_outer, updates=("nesterov",), lengths=(50,)),
    partial(compare, seeds=(1,), splits=("iid",), updates=("replace",), codecs=("int8",)),
    partial(compare, seeds=(1,), splits=("iid",), updates=("nesterov",), codecs=("int8",)),
    partial(compare, seeds=(1,), updates=("replace",), codecs=("int4", "sparse"), lengths=(10, 50)),
    *WITH_MUON,
    partial(in_fragments, seeds=(1,), updates=("replace",)),
    partial(tune_outer, updates=UPDATES, lengths=TUNED_LENGTHS),
    partial(compare, seeds=(1,), updates=FEW_UPDATES, codecs=FEW_CODECS),
    partial(compare, updates=FEW_UPDATES, codecs=FEW_CODECS),
    in_fragments,
    partial(compare, seeds=(1,)),
    partial(compare, seeds=(1,), facilities=(2, 8), updates=FEW_UPDATES, codecs=FEW_CODECS),
    partial(compare, facilities=(4, 2, 8)),
)

# AdamW's rate is the one that processors found; the server's are found here, at more lengths
GPU_STAGES = (
    partial(tune_outer, updates=UPDATES, lengths=TUNED_LENGTHS),
    partial(compare, facilities=(4,)),
    partial(compare, facilities=(2,)),
    partial(compare, facilities=(8,)),
)

if __name__ == "__main__":
    sys.exit(main())
