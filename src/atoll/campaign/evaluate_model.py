"""The held-out loss of a campaign's last model, which no further round would measure."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from atoll.campaign.asked import request
from atoll.campaign.calls import LOOK_SECONDS
from atoll.campaign.round import Question, answered
from atoll.campaign.store import CampaignStore
from atoll.errors import UserError, printable
from atoll.settings.exchange import SHOWN
from atoll.settings.federation import Site

FAILED = ("failed", "refused", "unreachable")


def evaluate_model(store: CampaignStore, number: int) -> None:
    """Ask every facility for it, side by side, for as long as a round may take; print the mean.

    A facility that fails is asked as often as in a round. What is known is not asked again.
    """
    journal = store.journal(number)
    clock = journal.last("evaluating") or journal.append("evaluating")
    end = float(clock["time"]) + 60 * store.campaign.deadline_minutes
    known = {record["facility"] for record in journal.records("evaluated")}
    waiting, stop = [s for s in store.campaign.sites if s.name not in known], threading.Event()
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        running = [pool.submit(_ask, store, number, site, end, stop) for site in waiting]
        try:
            for each in as_completed(running):
                each.result()
        finally:
            stop.set()
    loss = store.model_loss(number)
    if waiting:
        shown = "not known" if loss is None else f"{loss:.4f} (mean over facilities)"
        print(f"the model of round {number}: loss {shown}", flush=True)


def _ask(store: CampaignStore, number: int, site: Site, end: float, stop: threading.Event) -> None:
    """Until it has answered, failed too often, or the time is over."""
    failures = 0
    answer: dict[str, Any] = {"why": "the time was over"}
    while not stop.is_set() and time.time() < end:
        answer = _answer(store, number, site, end, stop)
        if answer["state"] == "ready":
            break
        failures += answer["state"] in FAILED
        if failures >= store.campaign.attempts:
            break
        left = max(0.0, end - time.time())
        stop.wait(min(store.campaign.poll_seconds, left + LOOK_SECONDS))
    if not stop.is_set():
        facts = {"losses": answer.get("losses", [])[:1], "why": answer.get("why", "")}
        store.journal(number).append("evaluated", facility=site.name, **facts)


def _answer(
    store: CampaignStore, number: int, site: Site, end: float, stop: threading.Event
) -> dict[str, Any]:
    """Whatever comes of one facility's words is that facility's failure."""
    wanted = json.dumps(request(store, number + 1, site, steps=0))
    question = Question(site, number + 1, wanted, ("--evaluate",))
    try:
        return answered(
            store, question, store.journal(number), lambda _: stop.is_set() or time.time() > end
        )
    except UserError as error:
        return {"state": "failed", "why": error.found}
    except Exception as error:
        why = f"{site.name}: unexpected {type(error).__name__}: {error}"
        return {"state": "failed", "why": printable(why, SHOWN)}
