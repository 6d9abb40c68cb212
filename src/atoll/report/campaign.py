"""What a campaign's report is made of: who did what in each round, and how long it took."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.campaign.journal import Record
from atoll.campaign.store import CampaignStore
from atoll.report.tables import Rows, mebibytes
from atoll.settings.federation import Site


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


def rounds(store: CampaignStore) -> list[Round]:
    """Every round that has begun, in order."""
    return [_round(store, number) for number in store.begun_rounds()]


def _round(store: CampaignStore, number: int) -> Round:
    records = store.journal(number).records()
    averaged = next((one for one in records if one["event"] == "averaged"), None)
    after = store.mean_losses(number + 1)
    return Round(
        number,
        records[0]["time"] if records else 0.0,
        averaged["time"] if averaged else None,
        averaged["seconds"] if averaged else None,
        [_part(store, number, site, records) for site in store.campaign.sites],
        after[0] if after else None,
    )


def _part(store: CampaignStore, number: int, site: Site, records: list[Record]) -> Part:
    answer = store.state(number, site).answer
    mine = [one for one in records if one.get("facility") == site.name]
    sent = [one for one in mine if one["event"] == "sent"]
    received = [one for one in mine if one["event"] == "received"]
    times = [answer.get(name) for name in ("submitted", "started", "ended")]
    weights = store.model_manifest(number)["weights"] if store.has_model(number) else {}
    return Part(
        round=number,
        facility=site.name,
        asked=store.asked_round(number, site),
        queue_seconds=_between(times[0], times[1]),
        train_seconds=_between(times[1], times[2]),
        sent_bytes=sum(one["bytes"] for one in sent),
        sent_seconds=sum(one["seconds"] for one in sent),
        received_bytes=sum(one["bytes"] for one in received),
        received_seconds=sum(one["seconds"] for one in received),
        losses=answer.get("losses") or [],
        weight=weights.get(site.name),
        spans=_spans(sent, received, answer),
        why="; ".join(_reasons(store, number, site, mine)),
    )


def _spans(
    sent: list[Record], received: list[Record], answer: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    spans = {}
    for name, records in (("send", sent), ("fetch", received)):
        for one in records[-1:]:
            spans[name] = (one["time"] - one["seconds"], one["time"])
    for name, begin, end in (("queue", "submitted", "started"), ("train", "started", "ended")):
        if answer.get(begin) is not None and answer.get(end) is not None:
            spans[name] = (answer[begin], answer[end])
    return spans


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _reasons(store: CampaignStore, number: int, site: Site, records: list[Record]) -> Iterator[str]:
    """Why it was asked again, and why it is not in the model."""
    wrong = [one["why"] for one in records if one["event"] in ("wrong", "afresh")]
    without = store.without if store.has_model(number) else store.left_out
    final = without(number).get(site.name)
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
