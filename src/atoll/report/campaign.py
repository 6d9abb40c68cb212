"""What a campaign's report is made of: who did what in each round, and how long it took."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.campaign import store as state
from atoll.campaign.store import CampaignStore, is_whole
from atoll.report.tables import Rows, mebibytes


@dataclass(frozen=True)
class Part:
    """What one facility did in one round; None where that is not known."""

    round: int
    facility: str
    asked: int  # the round whose work it did: an earlier one, where it was late
    queue_seconds: float | None
    train_seconds: float | None
    sent_bytes: int
    sent_seconds: float
    received_bytes: int
    received_seconds: float
    losses: list[float]  # held-out: of the model it began with, and of its own
    weight: float | None
    spans: dict[str, tuple[float, float]]  # send, queue, train, fetch: from when to when
    why: str  # it has no part in the round's model, or was asked again


@dataclass(frozen=True)
class Round:
    """One round of a campaign that has begun."""

    number: int
    began: float
    ended: float | None
    average_seconds: float | None
    parts: list[Part]
    global_loss: float | None  # of the model it ends with, as the next round's facilities find it


def rounds(held: CampaignStore) -> list[Round]:
    """Every round that has begun, in order."""
    events = events_of(held.folder)
    begun = [n for n in range(1, held.campaign.rounds + 1) if (held.round(n)).is_dir()]
    return [_round(held, number, events) for number in begun]


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of events.jsonl; one that was cut off by a kill is left out."""
    path = folder / "events.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _round(held: CampaignStore, number: int, events: list[dict[str, Any]]) -> Round:
    mine = [one for one in events if one["round"] == number]
    averaged = next((one for one in mine if one["event"] == "averaged"), None)
    began = next((one["time"] for one in mine if one["event"] == "round"), mine[0]["time"])
    after = state.mean_losses(held, number + 1)
    return Round(
        number,
        began,
        averaged["time"] if averaged else None,
        averaged["seconds"] if averaged else None,
        [_part(held, number, site.name, mine) for site in held.campaign.sites],
        after[0] if after else None,
    )


def _part(held: CampaignStore, number: int, facility: str, events: list[dict[str, Any]]) -> Part:
    site = held.site(facility)
    said = state.said_last(held, number, site)
    mine = [one for one in events if one.get("facility") == facility]
    sent = [one for one in mine if one["event"] == "sent"]
    received = [one for one in mine if one["event"] == "received"]
    times = [said.get(name) for name in ("submitted", "started", "ended")]
    weights = state.global_manifest(held, number)["weights"] if is_whole(held.model(number)) else {}
    return Part(
        round=number,
        facility=facility,
        asked=state.asked_round(held, number, site),
        queue_seconds=_between(times[0], times[1]),
        train_seconds=_between(times[1], times[2]),
        sent_bytes=sum(one["bytes"] for one in sent),
        sent_seconds=sum(one["seconds"] for one in sent),
        received_bytes=sum(one["bytes"] for one in received),
        received_seconds=sum(one["seconds"] for one in received),
        losses=said.get("losses") or [],
        weight=weights.get(facility),
        spans=_spans(sent, received, said),
        why="; ".join(_reasons(held, number, facility, mine)),
    )


def _spans(
    sent: list[dict[str, Any]], received: list[dict[str, Any]], said: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    found = {}
    for name, events in (("send", sent), ("fetch", received)):
        for one in events[-1:]:
            found[name] = (one["time"] - one["seconds"], one["time"])
    for name, begin, end in (("queue", "submitted", "started"), ("train", "started", "ended")):
        if said.get(begin) is not None and said.get(end) is not None:
            found[name] = (said[begin], said[end])
    return found


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _reasons(
    held: CampaignStore, number: int, facility: str, events: list[dict[str, Any]]
) -> Iterator[str]:
    """Why it was asked again, and why it is not in the model."""
    wrong = [one["why"] for one in events if one["event"] == "wrong"]
    final = None
    if is_whole(held.model(number)):
        final = state.without(held, number).get(facility)
    else:
        final = state.left_out(held, number).get(facility)
    for why in dict.fromkeys(wrong):
        if why != final:
            yield f"asked again: {why}"
    if final is not None:
        yield f"left out: {final}"


def parts(found: list[Round]) -> Rows:
    """A line for each facility in each round."""
    titles = ["round", "facility", "queue s", "send s", "train s", "fetch s", "MiB out", "MiB in"]
    titles += ["loss", "trained", "weight", "remarks"]
    return [titles, *(_row(part) for one in found for part in one.parts)]


def ends(found: list[Round]) -> Rows:
    """A line for each round."""
    rows = [["round", "seconds", "average s", "loss of its model"]]
    for one in found:
        lasted = None if one.ended is None else one.ended - one.began
        loss = "" if one.global_loss is None else f"{one.global_loss:.4f}"
        rows.append([str(one.number), _figure(lasted), _figure(one.average_seconds), loss])
    return rows


def _row(part: Part) -> list[str]:
    losses = [f"{part.losses[0]:.4f}", f"{part.losses[-1]:.4f}"] if part.losses else ["", ""]
    late = f"work of round {part.asked}" if part.asked != part.round else ""
    return [
        str(part.round),
        part.facility,
        _figure(part.queue_seconds),
        f"{part.sent_seconds:.1f}",
        _figure(part.train_seconds),
        f"{part.received_seconds:.1f}",
        mebibytes(part.sent_bytes),
        mebibytes(part.received_bytes),
        *losses,
        "" if part.weight is None else f"{part.weight:.2f}",
        "; ".join(word for word in (late, part.why) if word),
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
