"""What a campaign's report is made of: who did what in each round, and how long it took."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.campaign.journal import Record
from atoll.campaign.store import CampaignStore
from atoll.cluster.goodput import effective
from atoll.report.tables import Rows, in_minutes, mebibytes, number
from atoll.settings.exchange import GOODPUT_COLUMNS
from atoll.settings.federation import Site


@dataclass(frozen=True)
class Part:
    """What one facility did in one round."""

    round: int
    facility: str
    of_round: int  # the round whose work it did: an earlier one, where it was late
    steps: int  # that it was asked for
    sent: list[Record]
    received: list[Record]
    spans: dict[str, tuple[float, float]]  # send, queue, train, fetch: from when to when, if known
    node_seconds: dict[str, float]  # by column of the goodput; empty: not known
    losses: list[float]  # held-out: of the model it began with, and of its own
    weight: float | None
    why: str  # it has no part in the round's model, or was asked again

    @property
    def sent_bytes(self) -> int:
        return sum(event["bytes"] for event in self.sent)

    @property
    def received_bytes(self) -> int:
        return sum(event["bytes"] for event in self.received)

    def seconds(self, span: str) -> float | None:
        """How long it was queued, or trained; None where that is not known."""
        begin, end = self.spans.get(span, (0.0, 0.0))
        return max(0.0, end - begin) if span in self.spans else None


@dataclass(frozen=True)
class Round:
    """One round of a campaign that has begun."""

    number: int
    began: float
    ended: float | None
    average_seconds: float | None
    parts: list[Part]
    global_loss: float | None  # held-out, of the model it ends with, the mean over facilities


def rounds(store: CampaignStore) -> list[Round]:
    """Every round that has begun, in order; one that noted nothing before a kill has not."""
    journals = [(number, store.journal(number).records()) for number in store.begun_rounds()]
    return [_round(store, number, records) for number, records in journals if records]


def _round(store: CampaignStore, number: int, records: Sequence[Record]) -> Round:
    averaged: Record = next((r for r in records if r["event"] == "averaged"), {})
    return Round(
        number,
        records[0]["time"],
        averaged.get("time"),
        averaged.get("seconds"),
        [_part(store, number, site, records) for site in _facilities(store, number)],
        store.global_loss(number),
    )


def _facilities(store: CampaignStore, number: int) -> list[Site]:
    """Those of the campaign, and of those that have left it whoever has a part in the round."""
    made = store.in_model(number) if store.has_model(number) else []
    return [*store.campaign.sites, *(site for site in made if site not in store.campaign.sites)]


def _part(store: CampaignStore, number: int, site: Site, records: Sequence[Record]) -> Part:
    answer = store.state(number, site).answer
    own = [record for record in records if record.get("facility") == site.name]
    sent = [record for record in own if record["event"] == "sent"]
    received = [record for record in own if record["event"] == "received"]
    weights = store.model_manifest(number)["weights"] if store.has_model(number) else {}
    return Part(
        round=number,
        facility=site.name,
        of_round=store.asked_round(number, site),
        steps=store.steps(store.asked_round(number, site), site),
        sent=sent,
        received=received,
        spans=_spans(sent, received, answer),
        node_seconds=answer.get("node_seconds") or {},
        losses=answer.get("losses") or [],
        weight=weights.get(site.name),
        why="; ".join(_reasons(store, number, site, own)),
    )


def _spans(
    sent: list[Record], received: list[Record], job: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """When it was at what: of the transfers the last; nothing where an end is not known."""
    last = {"send": sent[-1:], "fetch": received[-1:]}
    spans = {name: (e["time"] - e["seconds"], e["time"]) for name, es in last.items() for e in es}
    ends = {"queue": ("submitted", "started"), "train": ("started", "ended")}
    jobs = {name: (job.get(begin), job.get(end)) for name, (begin, end) in ends.items()}
    return spans | {name: (a, b) for name, (a, b) in jobs.items() if None not in (a, b)}


def _reasons(
    store: CampaignStore, number: int, site: Site, records: Sequence[Record]
) -> Iterator[str]:
    """Why it was asked again, and why it is not in the model."""
    missing = store.without if store.has_model(number) else store.left_out
    final = missing(number).get(site.name)
    wrong = [record["why"] for record in records if record["event"] in ("wrong", "afresh")]
    for why in dict.fromkeys(wrong):
        if why != final:
            yield f"asked again: {why}"
    if final is not None:
        yield f"left out: {final}"


def campaign_cells(store: CampaignStore, rounds: Sequence[Round]) -> dict[str, str]:
    """Name -> value of what came of it, without what is not known."""
    losses = [each.global_loss for each in rounds if each.global_loss is not None]
    before, ends = store.mean_losses(1), [each.ended for each in rounds if each.ended]
    parts = [part for each in rounds for part in each.parts]
    of_all = list(spent(rounds).values())[-1:]
    cells = {
        "facilities": str(len(store.campaign.sites)),
        "rounds": f"{len(ends)} of {store.campaign.rounds}",
        "held-out loss before": number(before[0] if before else None, 4),
        "held-out loss": number(losses[-1] if losses else None, 4),
        "held-out perplexity": number(math.exp(min(losses[-1], 700.0)) if losses else None, 2),
        "minutes": number((max(ends) - rounds[0].began) / 60 if ends else None, 2),
        "MiB sent": mebibytes(sum(part.sent_bytes + part.received_bytes for part in parts)),
        "goodput": "".join(f"{effective(columns):.1%}" for columns in of_all),
        "left out": str(sum("left out: " in part.why for part in parts) or ""),
    }
    return {name: cell for name, cell in cells.items() if cell}


def campaign_tables(rounds: Sequence[Round]) -> dict[str, Rows]:
    """Title -> rows: one for each facility in each round, and one for each round."""
    return {
        "Facilities": [_facility(part) for each in rounds for part in each.parts],
        "Rounds": [_whole_round(each) for each in rounds],
        "Goodput, node-minutes": [
            {"facility": facility, **in_minutes(columns)}
            for facility, columns in spent(rounds).items()
        ],
    }


def spent(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Node-seconds by column that each facility's jobs held, over all rounds; last, of all."""
    facilities: dict[str, dict[str, float]] = {}
    for part in (part for each in rounds for part in each.parts if part.node_seconds):
        for name in (part.facility, "all facilities"):
            columns = facilities.setdefault(name, dict.fromkeys(GOODPUT_COLUMNS, 0.0))
            for column in GOODPUT_COLUMNS:
                columns[column] += part.node_seconds.get(column, 0.0)
    everything = facilities.pop("all facilities", {})
    return facilities | ({"all facilities": everything} if len(facilities) > 1 else {})


def _facility(part: Part) -> dict[str, str]:
    losses: list[float] | list[None] = part.losses or [None]
    late = f"work of round {part.of_round}" if part.of_round != part.round else ""
    return {
        "round": str(part.round),
        "facility": part.facility,
        "steps": str(part.steps),
        "queue s": number(part.seconds("queue")),
        "send s": number(sum(event["seconds"] for event in part.sent)),
        "train s": number(part.seconds("train")),
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
