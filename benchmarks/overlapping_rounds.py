"""Time to a target loss of rounds in fragments that overlap, against whole models, in virtual time.

    python benchmarks/overlapping_rounds.py [--seeds 5] [--rounds 30] [--steps 400] [--quick]
    python benchmarks/overlapping_rounds.py --logs KTH-SP2-1996-2.1-cln.swf [MORE.swf]

Text, model, queues and seconds of a step are those of steps_by_queue.py, and so is the target: what
whole models reach after four fifths of their rounds. The model trains for real, each facility on
its own weights; the clock is a campaign's: a facility is asked when it has sent its last update and
the model is there that the round begins with: that of the round before, or with
`rule.overlap_rounds=1` of the one before that. A line brings a whole model in ten minutes (Llama-2
7B in int8 by 90 Mbit/s; `--line-minutes`) and a fragment by its share of the values. `half`: rounds
of half the steps, so that every tensor is averaged as often as where whole models travel.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
import torch
from steps_by_queue import (
    FACILITIES,
    START_SECONDS,
    TEXTS,
    Facility,
    all_texts,
    first_weights,
    loss_of,
    queues_of,
    trained,
)

LINE_MINUTES = 10.0  # of a whole model, each way
PARTS = (("0.", "2."), ("4.",))  # of the model's two fragments: its layers
MOST_STEPS = 2  # times those of whole models, to reach their loss
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """How a campaign's rounds go, by the names of its rule."""

    fragments: int = 1
    overlap_rounds: int = 0
    merge_alpha: float = 0.0
    steps_share: float = 1.0  # of a round's steps, where whole models travel

    def part(self, number: int, weights: Weights) -> Weights:
        """The tensors that a round sends."""
        if self.fragments == 1:
            return weights
        prefixes = PARTS[(number - 1) % self.fragments]
        return {name: tensor for name, tensor in weights.items() if name.startswith(prefixes)}

    def sent_share(self, number: int, weights: Weights) -> float:
        """How much of a model travels in a round; of the first one all."""
        part = weights if number == 0 else self.part(number, weights)
        return sum(t.numel() for t in part.values()) / sum(t.numel() for t in weights.values())


WAYS = {
    "whole models": Way(),
    "fragments": Way(2),
    "fragments, half": Way(2, steps_share=0.5),
    "fragments, overlap": Way(2, 1, 0.5),
    "fragments, overlap, half": Way(2, 1, 0.5, 0.5),
}
PEER = "whole models"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--line-minutes", type=float, default=LINE_MINUTES, help="a whole model's")
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=TEXTS)
    parser.add_argument("--quick", action="store_true", help="one seed, few and short rounds")
    parser.add_argument("--logs", nargs="+", type=Path, help="of facilities' jobs, in the SWF")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.rounds, arguments.steps = 1, 10, 60
    torch.set_num_threads(1)
    rows = [row for kind in arguments.texts for row in compared(kind, arguments)]
    if not arguments.quick:
        results.record("overlapping_rounds", rows)
    return 0


def compared(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Hours to the same loss, by seed, and hours of a round; rows of the results."""
    texts, held_out = all_texts(mixed=kind == TEXTS[0])
    hours: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(1, arguments.seeds + 1):
        target = -math.inf
        for name, way in WAYS.items():
            curve = curve_of(way, seed, arguments, texts, held_out, target)
            if name == PEER:
                target = min(loss for _, loss in curve[: math.ceil(0.8 * len(curve))])
            reached = next((t for t, loss in curve if loss <= target), math.inf) / 3600
            hours[name].append(reached)
            print(
                f"{kind}, seed {seed}, {name}: {target:.4f} nats after {reached:.1f} h, "
                f"{len(curve)} rounds of {curve[-1][0] / 3600 / len(curve):.2f} h",
                flush=True,
            )
    about = f"{len(texts)} facilities, {kind}, {arguments.steps} steps a round"
    about += f", {arguments.line_minutes:g} minutes of line"
    if arguments.logs:
        about += f", waits of {', '.join(log.stem for log in arguments.logs)}"
    return [
        results.row(
            f"{about}: time to a loss, {name}", "h", hours[name], PEER, hours[PEER], "lower"
        )
        for name in WAYS
        if name != PEER
    ]


def curve_of(
    way: Way,
    seed: int,
    arguments: argparse.Namespace,
    texts: dict[str, torch.Tensor],
    held_out: torch.Tensor,
    target: float,
) -> list[tuple[float, float]]:
    """Virtual seconds and the held-out loss after every round; to a target if there is one."""
    queues = queues_of(seed, arguments.logs)
    facilities = [Facility(name, text, queues[name]) for name, text in texts.items()]
    steps = int(arguments.steps * way.steps_share)
    rounds = int(arguments.rounds / way.steps_share)
    rounds *= 1 if math.isinf(target) else MOST_STEPS
    line = 60 * arguments.line_minutes
    ends = averaged_at(way, facilities, steps, first_weights(seed), line)
    curve = []
    for loss in losses(way, facilities, steps, seed, held_out):
        curve.append((next(ends), loss))
        if loss <= target or len(curve) == rounds:
            return curve
    return curve


def averaged_at(
    way: Way, facilities: Sequence[Facility], steps: int, weights: Weights, line_seconds: float
) -> Iterator[float]:
    """When the model of each round is there: the clock of a campaign, whatever it learns.

    line_seconds: of a whole model, each way.
    """
    averaged, free = [0.0], {facility.name: 0.0 for facility in facilities}
    while True:
        number = len(averaged)
        base = max(0, number - 1 - way.overlap_rounds)
        down, up = (line_seconds * way.sent_share(n, weights) for n in (base, number))
        for facility in facilities:
            asked = max(free[facility.name], averaged[base])
            queued = asked + down * (base > 0 or number == 1)
            started = queued + facility.queue.wait_seconds(queued)
            ended = started + START_SECONDS + steps * FACILITIES[facility.name][2]
            free[facility.name] = ended + up
        averaged.append(max(free.values()))
        yield averaged[-1]


def losses(
    way: Way, facilities: Sequence[Facility], steps: int, seed: int, held_out: torch.Tensor
) -> Iterator[float]:
    """The held-out loss of the global model after each round, of real training."""
    model = first_weights(seed)
    own = {facility.name: dict(model) for facility in facilities}
    number, models = 0, [model]
    while True:
        number += 1
        taken = number - 1 - way.overlap_rounds
        for facility in facilities:
            mine = own[facility.name]
            if taken > 0:
                for name, tensor in way.part(taken, models[taken]).items():
                    mine[name] = torch.lerp(tensor, mine[name], way.merge_alpha)
            done = (number - 1) * steps
            own[facility.name] = trained(mine, facility, steps, done, seed)
        mean = {
            name: torch.stack([own[facility.name][name] for facility in facilities]).mean(0)
            for name in way.part(number, model)
        }
        model = model | mean
        models.append(model)
        yield loss_of(model, held_out)


if __name__ == "__main__":
    sys.exit(main())
