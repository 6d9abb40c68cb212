"""Time to a target loss with steps_by=queue against fixed steps, in virtual time.

    python benchmarks/steps_by_queue.py [--seeds 5] [--rounds 30] [--steps 400] [--quick] [--check]
    python benchmarks/steps_by_queue.py --logs KTH-SP2-1996-2.1-cln.swf [MORE.swf]
    python benchmarks/steps_by_queue.py --real [--rounds 10]       (as root: make testbed image-cpu)

Four facilities train one small character model on the Python library's text, once all on all of it,
once each on modules of its own, and for real: AdamW whose moments stay there, the mean weighed by
tokens. Their queues and the seconds of a step are drawn, not recorded: waits are log-normal with
medians from 6 minutes to 2 hours, and what a round waits resembles what the last one did (AR(1),
0.7). The real code chooses the steps from the journals of earlier rounds. All ways meet the same
waits in every round that a facility begins, or of a log at every moment. The target is what fixed
steps reach after four fifths of their rounds. `late work`: with a deadline, a tenth above what the
medians of queues and work need; who is not done then is taken a round later, for less
(rule.max_staleness=1). `--logs`: waits are those of jobs at real facilities, in place of drawn ones
(recorded_queues.py). `--real`: in real time, between the two Slurms of the testbed
(steps_by_queue_real.py).
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
from typing import Any, Protocol

import results
import torch
from recorded_queues import recorded_queue

from atoll.campaign.steps_by_queue import Pace, choose_steps, shared_steps
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.config.compose import campaign_values
from atoll.federation.combine import weights_of
from atoll.settings.federation import Campaign

TESTBED = Path(__file__).resolve().parents[1] / "tests" / "testbed"
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
WAYS = {  # how steps are chosen, whether late work is taken a round later, how updates weigh
    "fixed steps": ("fixed", False, "steps"),
    "fixed steps, late work": ("fixed", True, "steps"),
    "steps by queue": ("queue", False, "steps"),
    "steps by queue, late work": ("queue", True, "steps"),
    "steps by queue, equal weights": ("queue", False, "equal"),
}
PEER, LATE, BOTH = "fixed steps", "fixed steps, late work", "steps by queue, late work"
TEXTS = ("mixed text", "own modules")  # all facilities have the same, or each its own
ROOM = 1.1  # a deadline, over what the medians need
QUORUM = 2
CONTEXT, WIDTH, BATCH, RATE = 12, 96, 32, 2e-3
CHARACTERS = 128
HELD_OUT = 0.1
MOST_ROUNDS = 3  # times those of fixed steps, to reach their loss


class Queue(Protocol):
    @property
    def median_minutes(self) -> float: ...

    def wait_seconds(self, now: float) -> float: ...


@dataclass
class Drawn:
    """A queue whose waits are log-normal, each like the one before."""

    median_minutes: float
    draws: random.Random
    level: float = 0.0

    def wait_seconds(self, now: float) -> float:
        new = self.draws.gauss(0.0, SPREAD * math.sqrt(1 - MEMORY**2))
        self.level = MEMORY * self.level + new
        return self.median_minutes * MINUTE * math.exp(self.level)


@dataclass
class Facility:
    """Text, queue and optimizer of one facility."""

    name: str
    text: torch.Tensor
    queue: Queue
    moments: dict[str, object] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="30; of --real 10")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=TEXTS)
    parser.add_argument("--quick", action="store_true", help="one seed, few and short rounds")
    parser.add_argument("--check", action="store_true", help="fail where the target is missed")
    parser.add_argument("--real", action="store_true", help="between the testbed's two Slurms")
    parser.add_argument("--logs", nargs="+", type=Path, help="of facilities' jobs, in the SWF")
    arguments = parser.parse_args()
    if arguments.real:
        return real(arguments)
    if arguments.quick:
        arguments.seeds, arguments.rounds, arguments.steps = 1, 10, 60
    arguments.rounds = arguments.rounds or 30
    torch.set_num_threads(1)
    rows = [row for kind in arguments.texts for row in compared(kind, arguments)]
    if arguments.quick:
        return 0
    return int(not results.record("steps_by_queue", rows) and arguments.check)


def real(arguments: argparse.Namespace) -> int:
    arguments.rounds = arguments.rounds or 10
    sys.path[:0] = [str(TESTBED)]  # its Slurms, and how a campaign gets to them
    from steps_by_queue_real import run_real

    return run_real(arguments)


def compared(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Hours to the same loss, by seed; a row of the results for each way."""
    texts, held_out = all_texts(mixed=kind == TEXTS[0])
    hours: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(1, arguments.seeds + 1):
        target = -math.inf
        for way in WAYS:
            curve = campaign(way, seed, arguments, texts, held_out, target)
            if way == PEER:
                target = min(loss for _, loss in curve[: math.ceil(0.8 * len(curve))])
            reached = next((t for t, loss in curve if loss <= target), math.inf) / 3600
            hours[way].append(reached)
            print(
                f"{kind}, seed {seed}, {way}: {target:.4f} nats after {reached:.1f} h, "
                f"{len(curve)} rounds",
                flush=True,
            )
    recorded = f", waits of {', '.join(log.stem for log in arguments.logs or ())}"
    about = f"{len(texts)} facilities, {kind}, {arguments.steps} steps a round"
    about += recorded if arguments.logs else ""
    return rows_of(about, hours, TARGET if kind == TEXTS[0] else None)


def rows_of(
    about: str, hours: dict[str, list[float]], target: float | None
) -> list[dict[str, Any]]:
    """Every way beside fixed steps; and beside those with late work what has both."""
    made = [
        results.row(
            f"{about}: time to a loss, {way}", "h", hours[way], PEER, hours[PEER], "lower", target
        )
        for way in WAYS
        if way != PEER
    ]
    late = f"{about}: time to a loss, {BOTH}"
    return [*made, results.row(late, "h", hours[BOTH], LATE, hours[LATE], "lower")]


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


@dataclass
class Work:
    """What a facility is at: its change of the weights it began with, and when it is over."""

    change: dict[str, torch.Tensor]
    steps: int
    asked: int  # the round that asked for it
    submitted: float
    waited: float
    step_seconds: float

    @property
    def ended(self) -> float:
        working = self.steps * self.step_seconds
        return self.submitted + self.waited + START_SECONDS + working

    @property
    def taken(self) -> float:
        return self.ended + TRANSFER_SECONDS


def campaign(
    way: str,
    seed: int,
    arguments: argparse.Namespace,
    texts: dict[str, torch.Tensor],
    held_out: torch.Tensor,
    target: float,
) -> list[tuple[float, float]]:
    """Virtual seconds and the held-out loss after every round; to a target if there is one."""
    queues = queues_of(seed, arguments.logs)
    facilities = [Facility(name, text, queues[name]) for name, text in texts.items()]
    weights, now, curve = first_weights(seed), 0.0, []
    at_work: dict[str, Work] = {}
    taken = dict.fromkeys(texts, 0)
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(Path(folder), way, arguments, queues)
        for number in range(1, (1 if way == PEER else MOST_ROUNDS) * arguments.rounds + 1):
            choose_steps(store, number)
            for facility in facilities:
                if facility.name not in at_work:
                    work = begun(store, number, facility, weights, taken[facility.name], now, seed)
                    at_work[facility.name] = work
                    taken[facility.name] += work.steps
            now = end_of_round(store.campaign, list(at_work.values()), now)
            weights = averaged(store, number, weights, taken_now(store, number, at_work, now))
            curve.append((now, loss_of(weights, held_out)))
            if curve[-1][1] <= target:
                break
    return curve


def queues_of(seed: int, logs: Sequence[Path] | None) -> dict[str, Queue]:
    """What each facility's rounds wait: drawn, or as recorded, the logs in turns."""
    queues: dict[str, Queue] = {}
    for place, (name, (_, minutes, _)) in enumerate(FACILITIES.items()):
        draws = random.Random(f"{seed} {name}")
        log = logs[place % len(logs)] if logs else None
        queues[name] = recorded_queue(log, place, draws) if log else Drawn(minutes, draws)
    return queues


def store_of(
    folder: Path, way: str, arguments: argparse.Namespace, queues: dict[str, Queue]
) -> CampaignStore:
    """A campaign of these facilities, of which the journals alone are there."""
    steps_by, late, weigh = WAYS[way]
    values = campaign_values(["federation=demo", f"steps_by={steps_by}"])
    values |= {"rounds": MOST_ROUNDS * arguments.rounds, "steps": arguments.steps}
    values["sites"] = [{"name": name, "folder": name} for name in FACILITIES]
    values["rule"] = {"quorum": QUORUM, "max_staleness": int(late), "weigh": weigh}
    values["deadline_minutes"] = (
        deadline_minutes(steps_by, arguments.steps, queues) if late else 1e6
    )
    return CampaignStore(checked_campaign(values), folder)


def deadline_minutes(steps_by: str, steps: int, queues: dict[str, Queue]) -> float:
    """A little more than a round takes where every queue is as its median."""
    beside = START_SECONDS + TRANSFER_SECONDS
    paces = {
        name: Pace(queues[name].median_minutes * MINUTE + beside, step_seconds)
        for name, (_, _, step_seconds) in FACILITIES.items()
    }
    chosen = shared_steps(dict(paces), steps, 4.0 if steps_by == "queue" else 1.0)
    return ROOM * max(paces[name].seconds(chosen[name]) for name in paces) / MINUTE


def begun(
    store: CampaignStore,
    number: int,
    facility: Facility,
    weights: dict[str, torch.Tensor],
    before: int,
    now: float,
    seed: int,
) -> Work:
    """A facility's part of a round: trained at once, taken when it would be over."""
    steps = store.steps(number, store.site(facility.name))
    after = trained(weights, facility, steps, before, seed)
    change = {name: after[name] - weights[name] for name in weights}
    step_seconds = FACILITIES[facility.name][2]
    return Work(change, steps, number, now, facility.queue.wait_seconds(now), step_seconds)


def end_of_round(campaign: Campaign, works: Sequence[Work], now: float) -> float:
    """When all are taken; at the deadline, once the quorum is there, where that is sooner."""
    ends = sorted(work.taken for work in works)
    quorum, deadline = campaign.rule.quorum, now + MINUTE * campaign.deadline_minutes
    return min(ends[-1], max(deadline, ends[quorum - 1]))


def taken_now(
    store: CampaignStore, number: int, at_work: dict[str, Work], now: float
) -> list[Work]:
    """Who is done, into the round's journal; the others go on, or begin anew where that is over."""
    done = [name for name, work in at_work.items() if work.taken <= now]
    for name in at_work.keys() - done:
        store.leave_out(number, store.site(name), "late", late=True)
        if number - at_work[name].asked >= store.campaign.rule.max_staleness:
            del at_work[name]
    for name in done:
        note(store, number, name, at_work[name])
    return [at_work.pop(name) for name in done]


def averaged(
    store: CampaignStore, number: int, weights: dict[str, torch.Tensor], works: Sequence[Work]
) -> dict[str, torch.Tensor]:
    """Weighed by steps, which here are tokens, or all the same; and less for late work."""
    rule = store.campaign.rule
    shares = weights_of(list(works), [number - work.asked for work in works], rule)
    pairs = list(zip(shares, works, strict=True))
    return {
        name: before + sum(share * work.change[name] for share, work in pairs)
        for name, before in weights.items()
    }


def note(store: CampaignStore, number: int, name: str, work: Work) -> None:
    """Queue, start, work and transfer, as a facility's answer and the journal have them."""
    times = {"submitted": work.submitted, "started": work.submitted + work.waited}
    times["ended"] = work.ended
    spent = {"start": START_SECONDS, "compute": work.steps * work.step_seconds}
    answer = {"state": "ready", **times, "node_seconds": spent}
    store.record_answer(number, store.site(name), answer)
    facts = {"facility": name, "bytes": 0, "seconds": TRANSFER_SECONDS}
    store.journal(number).append("received", **facts)


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


@torch.no_grad()
def loss_of(weights: dict[str, torch.Tensor], held_out: torch.Tensor) -> float:
    model = network()
    model.load_state_dict(weights)
    return float(loss_at(model, held_out, torch.arange(len(held_out) - CONTEXT)))


if __name__ == "__main__":
    sys.exit(main())
