"""54 days on 16,384 ranks, simulated: effective time against the interval between checkpoints.

    python benchmarks/goodput_simulation.py [--blocked 0.17] [--save 11] [--restart 120]
        [--campaigns 200] [--seed 1] [--check]

Interruptions come at the rate that Llama 3 published (419 unexpected ones in 54 days on 16,384
GPUs, arXiv:2407.21783), each at an exponential time after the one before, also while a job starts
again. The costs of a save are medians of results/checkpoint_against_dcp.jsonl unless given: those
of one machine and a small model, which say nothing of a parallel file system under 16,384 ranks;
the restart is a stated input. The best interval of the simulation is compared with Daly's.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass

import numpy as np
import results

from atoll.plan.checkpoint_interval import daly_seconds

# Llama 3, section 3.3.4: unexpected interruptions in so many days
INTERRUPTIONS, SECONDS = 419, 54 * 86_400.0
MEAN_SECONDS = SECONDS / INTERRUPTIONS


@dataclass(frozen=True)
class SaveCosts:
    """What saving and starting again cost a run, in seconds."""

    blocked_seconds: float  # training stands still for it
    save_seconds: float  # until the checkpoint is complete, the blocked part with it
    restart_seconds: float  # from the fault to the first new step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    blocked, save = measured()
    parser.add_argument("--blocked", type=float, default=blocked, help="seconds (%(default).3g)")
    parser.add_argument("--save", type=float, default=save, help="seconds (%(default).3g)")
    parser.add_argument("--restart", type=float, default=120.0, help="seconds (%(default)s)")
    parser.add_argument("--campaigns", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    costs = SaveCosts(arguments.blocked, arguments.save, arguments.restart)
    optimum = daly_seconds(costs.blocked_seconds, MEAN_SECONDS)
    lengths = [optimum * 2 ** (power / 2) for power in range(-8, 9)]
    gaps = drawn(arguments.campaigns, arguments.seed)
    shares = {length: effective(length, costs, gaps) for length in lengths}
    for length, share in shares.items():
        formula = effective_share(length, costs)
        print(f"{length:10.1f} s  simulated {share:.4%}  formula {formula:.4%}  {bar(share)}")
    best = max(shares, key=lambda length: shares[length])
    about = {"costs": vars(costs), "seed": arguments.seed, "campaigns": arguments.campaigns}
    curve = {"curve": [[length, share] for length, share in shares.items()]}
    case = f"16,384 ranks, 54 days, a save blocks {costs.blocked_seconds:.3g} s"
    values = ("share", [shares[optimum]], f"best simulated, {best:.0f} s", [shares[best]])
    row = results.row(f"{case}: effective at {optimum:.0f} s", *values, "higher", 0.999)
    return int(not results.record("goodput_simulation", [row | about | curve]) and arguments.check)


def measured() -> tuple[float, float]:
    """Seconds that a save blocked, and that it took, in the newest measurement kept."""
    lines = (results.FOLDER / "checkpoint_against_dcp.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["peer"] == "our whole save"]
    newest = rows[-1]["turns"]
    return statistics.median(newest["ours"]), statistics.median(newest["peer"])


def drawn(campaigns: int, seed: int) -> np.ndarray:
    """Seconds between interruptions, (campaigns, more than any needs): the same for all lengths."""
    count = int(SECONDS / MEAN_SECONDS * 1.5) + 50
    return np.random.default_rng(seed).exponential(MEAN_SECONDS, (campaigns, count))


def effective(length: float, costs: SaveCosts, gaps: np.ndarray) -> float:
    """The share of the time that went into work that was kept, over all campaigns.

    After an interruption a run starts again, then works and saves in turn; a save in the background
    counts when it is complete.
    """
    ends = np.minimum(np.cumsum(gaps, axis=1), SECONDS)
    spans = np.diff(ends, axis=1, prepend=0.0)
    working = spans - costs.restart_seconds
    background = costs.save_seconds - costs.blocked_seconds
    period = length + costs.blocked_seconds
    saved = np.floor(np.maximum(working - background, 0.0) / period)
    return float(saved.sum() * length / (SECONDS * len(gaps)))


def effective_share(work_seconds: float, costs: SaveCosts) -> float:
    """The same in closed form: Daly's whole time, equation 20, with saves in the background.

    A fault before a background save is complete loses what came before it too: that part, at the
    end of each save, counts as more time to make up after a fault.
    """
    redone = costs.restart_seconds + costs.save_seconds - costs.blocked_seconds
    segment = math.expm1((work_seconds + costs.blocked_seconds) / MEAN_SECONDS)
    return work_seconds / (MEAN_SECONDS * math.exp(redone / MEAN_SECONDS) * segment)


def bar(share: float) -> str:
    return "#" * round(60 * share)


if __name__ == "__main__":
    sys.exit(main())
