"""What a campaign's report is made of: who did what in each round, and how long it took."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.campaign import store as campaign_store
from atoll.campaign.store import CampaignStore, is_whole
from atoll.report.tables import Rows, mebibytes, number

Event = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What one facility did in one round."""

    round: int
    facility: str
    of_round: int  # the round whose work it did: an earlier one, where it was late
    sent: list[Event]
    received: list[Event]
    spans: dict[str, tuple[float, float]]  # send, queue, train, fetch: from when to when, if known
    losses: list[float]  # held-out: of the model it began with, and of its own
    weight: float | None
    why: str  # it has no part in the round's model, or was asked again

    @property
    def sent_bytes(self) -> int:
        return sum(event["bytes"] for event in self.sent)

    @property
    def received_bytes(self) -> int:
        return sum(event["bytes"] for event in self.received)

    @property
    def train_seconds(self) -> float | None:
        return self.seconds("train")

    def seconds(self, span: str) -> float | None:
        """How long it was queued, or trained; None where that is not known."""
        begin, end = self.spans.get(span, (None, None))
        return None if begin is None or end is None else max(0.0, end - begin)


@dataclass(frozen=True)
class Round:
    """One round of a campaign that has begun."""

    number: int
    began: float
    ended: float | None
    average_seconds: float | None
    parts: list[Part]
    global_loss: float | None  # of the model it ends with, as the next round's facilities find it


def rounds(store: CampaignStore) -> list[Round]:
    """Every round that has begun, in order."""
    by_round: dict[int, list[Event]] = {}
    for event in events_of(store.folder):
        by_round.setdefault(event["round"], []).append(event)
    numbers = range(1, store.campaign.rounds + 1)
    return [_round(store, number, by_round[number]) for number in numbers if number in by_round]


def events_of(folder: Path) -> list[Event]:
    """Lines of events.jsonl; one that was cut off by a kill is left out."""
    path = folder / "events.jsonl"
    events = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def _round(store: CampaignStore, number: int, events: Sequence[Event]) -> Round:
    averaged: Event = next((event for event in events if event["event"] == "averaged"), {})
    losses = campaign_store.mean_losses(store, number + 1)
    return Round(
        number,
        events[0]["time"],
        averaged.get("time"),
        averaged.get("seconds"),
        [_part(store, number, site.name, events) for site in store.campaign.sites],
        losses[0] if losses else None,
    )


def _part(store: CampaignStore, number: int, facility: str, events: Sequence[Event]) -> Part:
    site = store.site(facility)
    job = campaign_store.said_last(store, number, site)
    own = [event for event in events if event.get("facility") == facility]
    sent = [event for event in own if event["event"] == "sent"]
    received = [event for event in own if event["event"] == "received"]
    finished = is_whole(store.model(number))
    weights = campaign_store.global_manifest(store, number)["weights"] if finished else {}
    return Part(
        round=number,
        facility=facility,
        of_round=campaign_store.asked_round(store, number, site),
        sent=sent,
        received=received,
        spans=_transfers(sent, received) | _job_spans(job),
        losses=job.get("losses") or [],
        weight=weights.get(facility),
        why="; ".join(_reasons(store, number, facility, own)),
    )


def _transfers(sent: list[Event], received: list[Event]) -> dict[str, tuple[float, float]]:
    """The last of each, if there is one."""
    last = (("send", sent[-1:]), ("fetch", received[-1:]))
    return {name: (e["time"] - e["seconds"], e["time"]) for name, events in last for e in events}


def _job_spans(job: dict[str, Any]) -> dict[str, tuple[float, float]]:
    ends = {"queue": ("submitted", "started"), "train": ("started", "ended")}
    times = {name: (job.get(begin), job.get(end)) for name, (begin, end) in ends.items()}
    return {name: (a, b) for name, (a, b) in times.items() if a is not None and b is not None}


def _reasons(
    store: CampaignStore, number: int, facility: str, events: Sequence[Event]
) -> Iterator[str]:
    """Why it was asked again, and why it is not in the model."""
    missing = campaign_store.without if is_whole(store.model(number)) else campaign_store.left_out
    final = missing(store, number).get(facility)
    for why in dict.fromkeys(event["why"] for event in events if event["event"] == "wrong"):
        if why != final:
            yield f"asked again: {why}"
    if final is not None:
        yield f"left out: {final}"


def campaign_tables(rounds: Sequence[Round]) -> dict[str, Rows]:
    """Title -> rows: one for each facility in each round, and one for each round."""
    return {
        "Facilities": [_facility(part) for each in rounds for part in each.parts],
        "Rounds": [_whole_round(each) for each in rounds],
    }


def _facility(part: Part) -> dict[str, str]:
    losses: list[float] | list[None] = part.losses or [None]
    late = f"work of round {part.of_round}" if part.of_round != part.round else ""
    return {
        "round": str(part.round),
        "facility": part.facility,
        "queue s": number(part.seconds("queue")),
        "send s": number(sum(event["seconds"] for event in part.sent)),
        "train s": number(part.train_seconds),
        "fetch s": number(sum(event["seconds"] for event in part.received)),
        "MiB out": mebibytes(part.sent_bytes),
        "MiB in": mebibytes(part.received_bytes),
        "loss": number(losses[0], 4),
        "trained": number(losses[-1], 4),
        "weight": number(part.weight, 2),
        "remarks": "; ".join(remark for remark in (late, part.why) if remark),
    }


def _whole_round(each: Round) -> dict[str, str]:
    return {
        "round": str(each.number),
        "seconds": number(None if each.ended is None else each.ended - each.began),
        "average s": number(each.average_seconds),
        "loss of its model": number(each.global_loss, 4),
    }
