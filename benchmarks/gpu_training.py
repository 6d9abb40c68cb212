"""Training speed on one GPU: our trainer against others, in turns, in one run.

    python benchmarks/gpu_training.py [--minutes 9] [--cases 1b,124m,8b8] [--sides ...] [--check]
    python benchmarks/gpu_training.py --largest     the largest microbatch that fits, instead
    python benchmarks/gpu_training.py --dry-run     every side at a tiny size on this CPU

Llama models (gpu_cases.py): the shapes of 1B, of GPT-2 small, and of 8 layers of 8B. Every side
has the same model, random tokens, batch and precision (fp32 weights, bf16 arithmetic), fused AdamW
and clipping at 1.0, and a fresh process for each turn. First each side has a turn at each model;
then, as far as the minutes last, one more in the reverse order.

`ours` is `atoll launch` of a run folder, as any run; the rate is that of its metrics.jsonl after
the warm-up, and the process is ended when the timed steps are written there, before it would save.
The peers (gpu_sides.py): `hf_plain`, the Hugging Face Trainer with bf16=True alone; `hf_best`, with
its fast settings; `hf_whole` (only when named), the same with the whole model compiled;
`torchtitan` 0.2.2; `litgpt` 0.5.13. One that cannot be imported is said to be missing.

A machine that has torch and transformers alone needs two folders beside, which `make gpu-travel`
fills elsewhere, for its Python: .build/gpu/requirements and .build/gpu/peers. They are looked into
only for what is missing. litgpt wants lightning there, torchtitan triton.

MFU: tokens/s * (6*N + 12*L*d*T) / peak, N parameters without the embedding, T tokens of a sample.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_cases import CASES, DRY_CASES, Case
from gpu_processes import Place, called, trained

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"hf_plain": 1.4, "hf_best": 1.15, "torchtitan": 0.97}
MFU_TARGETS = {"1b": 0.4}
SIDES = ("ours", "hf_plain", "hf_best", "torchtitan", "litgpt")
FITTED = ("ours", "hf_best")
MISSING = "does not import"  # how gpu_sides.py says it
LONGEST_TURN_SECONDS = 240.0
MOST_SAMPLES = 1024  # of a microbatch; where no size is too large, the search ends here

Turn = tuple[str, str]  # the names of a case and a side


@dataclass
class Bench:
    """What was measured so far, and how much time is left for more."""

    cases: dict[str, Case]
    place: Place
    deadline: float
    outcomes: dict[Turn, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[Turn, str] = field(default_factory=dict)
    seconds: dict[Turn, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def rates(self, turn: Turn) -> list[float]:
        return [outcome["tokens_per_second"] for outcome in self.outcomes.get(turn, [])]

    def memory_gib(self, turn: Turn) -> float:
        return max(float(outcome["memory_gib"]) for outcome in self.outcomes[turn])


def main() -> int:
    arguments = parsed()
    find_requirements()
    cases = DRY_CASES if arguments.dry_run else {n: CASES[n] for n in arguments.cases.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        card = called("card", Path(folder), LONGEST_TURN_SECONDS)
        print(described(card), flush=True)
        on_gpu = card["name"] != "cpu"
        if not (on_gpu or arguments.dry_run):
            raise SystemExit("there is no GPU here: only --dry-run makes sense")
        deadline = time.monotonic() + 60 * arguments.minutes
        compiled = arguments.compile or not arguments.dry_run
        bench = Bench(cases, Place(Path(folder), on_gpu, compiled), deadline)
        if not compiled:
            print("torch.compile is off for every side: --compile turns it on", flush=True)
        sides = arguments.sides.split(",")
        rows = list(fitted(bench)) if arguments.largest else measured(bench, sides, card)
    return int(not reported(rows, arguments.dry_run) and arguments.check)


def find_requirements() -> None:
    """This clone's code, and what the machine lacks of our requirements, for every process."""
    folders = [str(ROOT / "src")]
    if find_spec("pydantic") is None:
        folders.append(str(ROOT / ".build" / "gpu" / "requirements"))
    sys.path[:0] = folders
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(folders + ([known] if known else []))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all turns together")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--largest", action="store_true", help="find the largest microbatches")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU; nothing is kept")
    parser.add_argument("--compile", action="store_true", help="compile in a dry run as well")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    return parser.parse_args()


def measured(bench: Bench, sides: Sequence[str], card: dict[str, Any]) -> list[dict[str, Any]]:
    """Every side's turn at every case, then as many again as there is time for."""
    first = [(case, side) for case in bench.cases for side in sides]
    for number, turn in enumerate(first):
        # a side that hangs may take no more than its share and that of two others
        fair = 3 * bench.left / (len(first) - number)
        take(bench, turn, min(fair, bench.left, LONGEST_TURN_SECONDS))
    again = [(case, side) for case in bench.cases for side in reversed(sides)]
    dropped = []
    for turn in (turn for turn in again if turn in bench.outcomes):
        if bench.left < 1.2 * bench.seconds[turn]:
            dropped.append(" ".join(turn))
            continue
        take(bench, turn, bench.left)
    if dropped:
        print(f"no time for a second turn of: {', '.join(dropped)}", flush=True)
    return [row for name in bench.cases for row in rows_of(bench, name, sides, card)]


def take(bench: Bench, turn: Turn, limit_seconds: float) -> None:
    """One turn, said as it ends; a side that cannot be had is not asked again."""
    case, side = turn
    missing = [why for (_, s), why in bench.failed.items() if s == side and why.startswith(MISSING)]
    if missing:
        bench.failed[turn] = missing[0]
        return
    started = time.monotonic()
    outcome = trained(bench.place, bench.cases[case], side, limit_seconds)
    bench.seconds[turn] = time.monotonic() - started
    if "failed" in outcome:
        bench.failed[turn] = outcome["failed"]
        print(f"{case:5} {side:10} {outcome['failed']}", flush=True)
        return
    bench.outcomes.setdefault(turn, []).append(outcome)
    print(
        f"{case:5} {side:10} {outcome['tokens_per_second']:10,.0f} tokens/s "
        f"{outcome['memory_gib']:6.2f} GiB  ({bench.seconds[turn]:.0f} s)",
        flush=True,
    )


def rows_of(
    bench: Bench, name: str, sides: Sequence[str], card: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row for each peer, and one for the share of the card's peak that ours reaches."""
    from results import row

    mine = (name, "ours")
    if mine not in bench.outcomes:
        print(f"{name}: ours has no rate, so nothing is compared: {bench.failed[mine]}", flush=True)
        return
    flops, memory = flops_per_token(bench.cases[name]), bench.memory_gib(mine)
    shared = {"gemm_tflops": card["gemm_tflops"], "memory_gib": memory, "device": card["name"]}
    shared |= {"microbatch": bench.cases[name].microbatch}
    reached = [rate * flops / 1e12 for rate in bench.rates(mine)]
    peak, target = card["peak_tflops"], MFU_TARGETS.get(name)
    if peak is not None:
        shared |= {"mfu": statistics.median(reached) / peak}
        yield row(f"{name}, MFU", "TFLOP/s", reached, "peak", [peak], "higher", target, **shared)
    for side in (side for side in sides if side != "ours"):
        turn = (name, side)
        if turn not in bench.outcomes:
            print(f"{name} {side}: {bench.failed.get(turn, 'not run')}", flush=True)
            continue
        peers = bench.rates(turn)
        more = shared | {"peer_memory_gib": bench.memory_gib(turn)}
        if peak is not None:
            more |= {"peer_mfu": statistics.median(peers) * flops / 1e12 / peak}
        yield row(
            name, "tokens/s", bench.rates(mine), side, peers, "higher", TARGETS.get(side), **more
        )


def flops_per_token(case: Case) -> float:
    from atoll.monitor.mfu import flops_per_token as of
    from atoll.plan.shapes import shape_of

    return of(shape_of(case.config), case.tokens)


def fitted(bench: Bench) -> Iterator[dict[str, Any]]:
    """The largest microbatch that fits, doubled until one is too large, at each case."""
    from results import row

    for name, case in bench.cases.items():
        sizes = {side: largest(bench, case, side) for side in FITTED}
        if all(sizes.values()):
            ours_samples, peers = ([float(sizes[side])] for side in FITTED)
            yield row(f"{name}, microbatch", "samples", ours_samples, FITTED[1], peers, "higher")


def largest(bench: Bench, case: Case, side: str) -> int:
    fits, samples = 0, case.microbatch
    most = MOST_SAMPLES if bench.place.on_gpu else 2 * samples
    while samples <= most:
        if bench.left < 20:
            print(f"{case.name:5} {side:10} no time to try {samples} samples", flush=True)
            return fits
        tried = trained(bench.place, case.with_microbatch(samples), side, bench.left)
        print(f"{case.name:5} {side:10} {samples:4} samples: {tried}", flush=True)
        if "failed" in tried:
            return fits
        fits, samples = samples, 2 * samples
    return fits


def reported(rows: list[dict[str, Any]], dry_run: bool) -> bool:
    """Print and keep; whether every target was met, and there was anything to compare."""
    from results import met, record, shown

    if not dry_run:
        return record("gpu_training", rows) and bool(rows)
    for row in rows:
        print(shown(row | {"target": None}), flush=True)
    return bool(rows) and all(met(row | {"target": None}) for row in rows)


def described(card: dict[str, Any]) -> str:
    if "failed" in card:
        raise SystemExit(card["failed"])
    peak, source = card["peak_tflops"], card["peak_source"]
    known = source if peak is None else f"peak {peak:.3g} TFLOP/s ({source})"
    return f"{card['name']}: {known}, its large matrix product reaches {card['gemm_tflops']:.3g}"


if __name__ == "__main__":
    sys.exit(main())
