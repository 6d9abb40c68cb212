"""Time to a target loss with steps_by=queue against fixed steps, in virtual time.

    python benchmarks/steps_by_queue.py [--seeds 5] [--rounds 30] [--steps 400] [--quick] [--check]

Four facilities train one small character model on the Python library's text, once all on all of it,
once each on modules of its own, and for real: AdamW whose moments stay there, the mean weighed by
tokens. Their queues and the seconds of a step are drawn, not recorded: waits are log-normal with
medians from 6 minutes to 2 hours, and what a round waits resembles what the last one did (AR(1),
0.7). The real code chooses the steps from the journals of earlier rounds. Both ways meet the same
waits in every round. The target is what fixed steps reach after four fifths of their rounds.
"""

import argparse
import math
import random
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results
import torch

from atoll.campaign.steps_by_queue import choose_steps
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.config.compose import campaign_values

TARGET = 0.80  # of the time with fixed steps: the least that FedQueue publishes is 0.795
MINUTE = 60.0
# facility -> its modules, the median minutes in its queue, the seconds of a step
FACILITIES = {
    "north": ("a*.py", 6.0, 20.0),
    "east": ("[c-e]*.py", 15.0, 14.0),
    "south": ("[f-n]*.py", 45.0, 25.0),
    "west": ("[p-z]*.py", 120.0, 12.0),
}
SPREAD, MEMORY = 0.8, 0.7  # of the logarithm of a wait
TRANSFER_SECONDS, START_SECONDS = 60.0, 90.0
CONTEXT, WIDTH, BATCH, RATE = 12, 96, 32, 2e-3
CHARACTERS = 128
HELD_OUT = 0.1
MOST_ROUNDS = 3  # times those of fixed steps, to reach their loss


@dataclass
class Facility:
    """Text, queue and optimizer of one facility."""

    name: str
    text: torch.Tensor
    draws: random.Random
    level: float = 0.0
    moments: dict[str, object] = field(default_factory=dict)

    def wait_seconds(self) -> float:
        new = self.draws.gauss(0.0, SPREAD * math.sqrt(1 - MEMORY**2))
        self.level = MEMORY * self.level + new
        return FACILITIES[self.name][1] * MINUTE * math.exp(self.level)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="one seed, few and short rounds")
    parser.add_argument("--check", action="store_true", help="fail where the target is missed")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.rounds, arguments.steps = 1, 10, 60
    torch.set_num_threads(1)
    rows = [compared(kind, arguments) for kind in ("mixed text", "own modules")]
    if arguments.quick:
        return 0
    return int(not results.record("steps_by_queue", rows) and arguments.check)


def compared(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Hours to the same loss, by seed; a row of the results."""
    texts, held_out = all_texts(mixed=kind == "mixed text")
    hours: dict[str, list[float]] = {"fixed": [], "queue": []}
    for seed in range(1, arguments.seeds + 1):
        fixed = campaign("fixed", seed, arguments, texts, held_out)
        target = min(loss for _, loss in fixed[: math.ceil(0.8 * len(fixed))])
        queue = campaign("queue", seed, arguments, texts, held_out, target)
        for steps_by, curve in (("fixed", fixed), ("queue", queue)):
            reached = next((t for t, loss in curve if loss <= target), math.inf)
            hours[steps_by].append(reached / 3600)
        print(
            f"{kind}, seed {seed}: {target:.4f} nats after {hours['queue'][-1]:.1f} h and "
            f"{len(queue)} rounds; with fixed steps after {hours['fixed'][-1]:.1f} h",
            flush=True,
        )
    case = f"{len(texts)} facilities, {kind}, {arguments.steps} steps a round: time to a loss"
    values = ("h", hours["queue"], "fixed steps", hours["fixed"])
    return results.row(case, *values, "lower", TARGET if kind == "mixed text" else None)


def all_texts(mixed: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Facility -> its characters; and the last tenth of each, which nobody trains on.

    mixed: all have the text of all, and draw other samples of it.
    """
    library, texts, held_out = Path(sysconfig.get_paths()["stdlib"]), {}, []
    for name, (pattern, _, _) in FACILITIES.items():
        text = "".join(path.read_text() for path in sorted(library.glob(pattern)))
        codes = torch.tensor([min(ord(letter), CHARACTERS - 1) for letter in text])
        cut = int(len(codes) * (1 - HELD_OUT))
        texts[name] = codes[:cut]
        held_out.append(codes[cut : cut + 20_000])
    if mixed:
        texts = dict.fromkeys(texts, torch.cat(list(texts.values())))
    return texts, torch.cat(held_out)


def campaign(
    steps_by: str,
    seed: int,
    arguments: argparse.Namespace,
    texts: dict[str, torch.Tensor],
    held_out: torch.Tensor,
    target: float | None = None,
) -> list[tuple[float, float]]:
    """Virtual seconds and the held-out loss after every round; to a target if there is one."""
    facilities = [Facility(n, text, random.Random(f"{seed} {n}")) for n, text in texts.items()]
    weights, now, curve = first_weights(seed), 0.0, []
    taken = dict.fromkeys(texts, 0)
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(Path(folder), steps_by, arguments)
        for number in range(1, (1 if target is None else MOST_ROUNDS) * arguments.rounds + 1):
            choose_steps(store, number)
            models, ends, counts = [], [], []
            for facility in facilities:
                steps = store.steps(number, store.site(facility.name))
                models.append(trained(weights, facility, steps, taken[facility.name], seed))
                taken[facility.name] += steps
                ends.append(end_of(store, number, facility, now, steps))
                counts.append(steps)
            weights = mean(models, counts)
            now = max(ends)
            curve.append((now, loss_of(weights, held_out)))
            if target is not None and curve[-1][1] <= target:
                break
    return curve


def store_of(folder: Path, steps_by: str, arguments: argparse.Namespace) -> CampaignStore:
    """A campaign of these facilities, of which the journals alone are there."""
    values = campaign_values(["federation=demo", f"steps_by={steps_by}"])
    values |= {"rounds": arguments.rounds, "steps": arguments.steps}
    values["sites"] = [{"name": name, "folder": name} for name in FACILITIES]
    return CampaignStore(checked_campaign(values), folder)


def end_of(store: CampaignStore, number: int, facility: Facility, now: float, steps: int) -> float:
    """Queue, start, work and transfer of a round, into its journal; when all of it is over."""
    started = now + facility.wait_seconds()
    working = steps * FACILITIES[facility.name][2]
    ended = started + START_SECONDS + working
    times = {"submitted": now, "started": started, "ended": ended}
    spent = {"start": START_SECONDS, "compute": working}
    answer = {"state": "ready", **times, "node_seconds": spent}
    store.record_answer(number, store.site(facility.name), answer)
    facts = {"facility": facility.name, "bytes": 0, "seconds": TRANSFER_SECONDS}
    store.journal(number).append("received", **facts)
    return ended + TRANSFER_SECONDS


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Embedding(CHARACTERS, 24),
        torch.nn.Flatten(1),
        torch.nn.Linear(24 * CONTEXT, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, CHARACTERS),
    )


def first_weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return network().state_dict()


def trained(
    weights: dict[str, torch.Tensor], facility: Facility, steps: int, before: int, seed: int
) -> dict[str, torch.Tensor]:
    """The weights after so many steps, on samples that follow those of earlier rounds."""
    model = network()
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if facility.moments:
        optimizer.load_state_dict(facility.moments)
    draws = torch.Generator()
    for step in range(before, before + steps):
        draws.manual_seed(random.Random(f"{seed} {facility.name} {step}").getrandbits(60))
        places = torch.randint(len(facility.text) - CONTEXT, (BATCH,), generator=draws)
        loss_at(model, facility.text, places).backward()
        optimizer.step()
        optimizer.zero_grad()
    facility.moments = optimizer.state_dict()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def loss_at(model: torch.nn.Module, text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    windows = text[places[:, None] + torch.arange(CONTEXT + 1)]
    return torch.nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def mean(models: Sequence[dict[str, torch.Tensor]], counts: Sequence[int]) -> dict:
    """Weighed by steps, which here are tokens."""
    shares = [count / sum(counts) for count in counts]
    pairs = list(zip(shares, models, strict=True))
    return {name: sum(share * model[name] for share, model in pairs) for name in models[0]}


@torch.no_grad()
def loss_of(weights: dict[str, torch.Tensor], held_out: torch.Tensor) -> float:
    model = network()
    model.load_state_dict(weights)
    return float(loss_at(model, held_out, torch.arange(len(held_out) - CONTEXT)))


if __name__ == "__main__":
    sys.exit(main())
