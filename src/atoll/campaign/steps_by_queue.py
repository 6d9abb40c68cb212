"""How many steps each facility takes in a round, so that all of them end together.

What a facility needs for a round is some time whatever its steps are (queue, start, evaluation,
transfers), and so long for each step. Both are the medians of its last rounds; it is less where its
scheduler says that the queue is shorter now (`sbatch --test-only`). With
`steps_by=queue` a round ends where the facilities, together, have taken as many steps as with
`steps_by=fixed`: who waits longer takes fewer. Updates weigh by their tokens as ever.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from atoll.campaign.journal import alone
from atoll.campaign.store import CampaignStore
from atoll.cluster.goodput import USEFUL
from atoll.settings.federation import Site

EARLIER_ROUNDS = 5  # that it finished, and its pace is learnt from
HALVINGS = 60  # of the span in which the common end is searched


@dataclass(frozen=True)
class Pace:
    """What a facility needs for a round."""

    other_seconds: float  # that no step takes: queue, start, evaluation, transfers
    step_seconds: float
    queue_seconds: float = 0.0  # of these, before its jobs began

    def seconds(self, steps: float) -> float:
        return self.other_seconds + steps * self.step_seconds


def choose_steps(store: CampaignStore, number: int) -> None:
    """Note in the round's journal, once, how many steps each facility is asked for."""
    campaign = store.campaign
    if campaign.steps_by == "fixed":
        return
    with alone(store.round(number)):
        if store.journal(number).last("steps"):
            return
        paces = {site.name: pace_of(store, number, site) for site in campaign.sites}
        chosen = shared_steps(paces, campaign.steps, campaign.steps_span)
        store.journal(number).append("steps", steps=chosen)


def shared_steps(paces: Mapping[str, Pace | None], steps: int, span: float) -> dict[str, int]:
    """Steps by facility, `steps` in the mean; who has no pace yet takes just these.

    span: nobody takes more than `steps` x span, nor fewer than `steps` / span.
    """
    known = {name: pace for name, pace in paces.items() if pace is not None}
    least, most = max(1, math.ceil(steps / span)), max(1, math.floor(steps * span))
    total = steps * len(known)
    low, high = 0.0, max((pace.seconds(most) for pace in known.values()), default=0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(_until(middle, pace, least, most) for pace in known.values()) <= total:
            low = middle
        else:
            high = middle
    chosen = {name: _until(low, pace, least, most) for name, pace in known.items()}
    for _ in range(total - sum(chosen.values())):
        open_to_more = [name for name in known if chosen[name] < most]
        first = min(open_to_more, key=lambda name: known[name].seconds(chosen[name] + 1))
        chosen[first] += 1
    return {name: chosen.get(name, steps) for name in paces}


def _until(end_seconds: float, pace: Pace, least: int, most: int) -> int:
    """Steps that end by then, within the bounds."""
    if end_seconds >= pace.seconds(most):
        return most
    if end_seconds <= pace.other_seconds:  # also of steps that are said to take no time
        return least
    fitting = math.floor((end_seconds - pace.other_seconds) / pace.step_seconds)
    return max(least, min(most, fitting))


def pace_of(store: CampaignStore, number: int, site: Site) -> Pace | None:
    """The medians of the last rounds that it finished; None where there are none.

    What a facility says of its time decides about its own steps alone, within the bounds.
    """
    earlier = (_seen(store, before, site) for before in range(number - 1, 0, -1))
    seen = list(islice((pace for pace in earlier if pace is not None), EARLIER_ROUNDS))
    if not seen:
        return None
    other = median(pace.other_seconds for pace in seen)
    expected = store.state(number - 1, site).answer.get("expected_wait_seconds")
    if expected is not None:  # no job there may last longer than that: the queue is no longer
        other = min(other, expected + median(p.other_seconds - p.queue_seconds for p in seen))
    return Pace(other, median(pace.step_seconds for pace in seen))


def _seen(store: CampaignStore, number: int, site: Site) -> Pace | None:
    """Of one round: from the job's hand-over to its end, and the transfers."""
    answer = store.state(number, site).answer
    started, ended = answer.get("started"), answer.get("ended")
    if answer.get("state") != "ready" or started is None or ended is None or ended <= started:
        return None
    records = store.journal(number).records("sent", "received")
    transfers = sum(r["seconds"] for r in records if r["facility"] == site.name)
    submitted = started if answer.get("submitted") is None else answer["submitted"]
    queue = max(0.0, started - submitted)
    stepping = (ended - started) * _stepping_share(answer.get("node_seconds") or {})
    steps = store.steps(store.asked_round(number, site), site)
    other = queue + transfers + (ended - started) - stepping
    return Pace(other, stepping / steps, queue)


def _stepping_share(node_seconds: Mapping[str, Any]) -> float:
    """Of a job's time, what its steps took; all of it where that is not known.

    Spare nodes are idle all the time, and so is what comes behind its last line.
    """
    held = (seconds for name, seconds in node_seconds.items() if name not in ("queue", "idle"))
    all_seconds = sum(held)
    useful = _of(node_seconds, USEFUL)
    return useful / all_seconds if all_seconds and useful else 1.0


def _of(node_seconds: Mapping[str, Any], names: Sequence[str]) -> float:
    return sum(float(node_seconds.get(name, 0.0)) for name in names)
