"""The held-out loss of the model that a campaign ends with: the facilities are asked once more.

Of any other round it is what they measure at the beginning of the next. Here nothing is trained and
nothing comes back but the number; no facility can end or hold the campaign: its failures are
counted, a silent one has the grace, one whose job is queued has the round's deadline.
round-NNN/losses/journal.jsonl is what came of it.
"""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atoll.campaign.asked import attempts_by, request
from atoll.campaign.calls import LOOK_SECONDS, Over
from atoll.campaign.journal import Journal
from atoll.campaign.round import bring
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import Unreachable
from atoll.errors import UserError, printable
from atoll.settings.exchange import SHOWN
from atoll.settings.federation import Site

SETTLED = ("measured", "left out")


@dataclass
class _Line:
    """When a facility gave its last sign of life."""

    heard: float = field(default_factory=time.time)

    def hear(self) -> None:
        self.heard = time.time()


def measure_last(store: CampaignStore, number: int) -> None:
    """Ask every facility for the loss of this round's model, until all said it or the deadline.

    Killed and started again it asks those that are missing; typed again where nobody said it, all.
    """
    journal = store.loss_journal(number)
    began = journal.last("began")
    if began and not (_missing(store, journal) or journal.records("measured")):
        journal.append("reopened", waits=False)  # who failed may be mended, as in a round
        began = {}
    began = began or journal.append("began")
    deadline = float(began["time"]) + 60 * store.campaign.deadline_minutes
    waiting, stop = _missing(store, journal), threading.Event()
    if not waiting:
        return
    print(f"round {number}: asking for the held-out loss of its model", flush=True)
    with ThreadPoolExecutor(len(waiting)) as pool:
        try:
            ask = partial(_ask_until_measured, store, number, deadline, stop)
            list(pool.map(ask, waiting))
        finally:
            stop.set()
    for site in _missing(store, journal):
        why = f"no answer after {store.campaign.deadline_minutes:g} minutes"
        journal.append("left out", facility=site.name, why=why)


def loss_request(store: CampaignStore, number: int, site: Site) -> dict[str, Any]:
    """What a round after this one would ask, but for its steps."""
    words, digest = request(store, number + 1, site), store.model_manifest(number)["digest"]
    overrides = [*words["overrides"], "training.steps=0"]
    attempts = attempts_by(store.campaign, store.loss_journal(number))
    words |= {"base": digest, "global_round": number, "attempts": attempts}
    return words | {"overrides": overrides}


def _ask_until_measured(
    store: CampaignStore, number: int, deadline: float, stop: threading.Event, site: Site
) -> None:
    """Up to the deadline and once, `attempts` failures, or the grace without an answer."""
    campaign, journal = store.campaign, store.loss_journal(number)
    failures, why, line, is_asked = 0, "", _Line(), False
    while not stop.is_set() and (time.time() <= deadline or not is_asked):
        end = max(deadline, time.time() + 60 * campaign.grace_minutes)
        is_asked, is_silent = True, False
        try:
            if _answered(store, number, end, stop, site, line):
                return
            line.hear()
            failures = 0  # errors of a line do not add up over days in a queue
        except Unreachable as error:
            why = error.in_a_line
            is_silent = time.time() - line.heard > 60 * campaign.grace_minutes
        except Exception as error:  # whatever one facility says, the others go on
            why = error.in_a_line if isinstance(error, UserError) else f"unexpected {error!r}"
            failures += 1
            line.hear()
            journal.append("wrong", facility=site.name, why=printable(why, SHOWN))
        if is_silent or failures >= campaign.attempts:
            journal.append("left out", facility=site.name, why=printable(why, SHOWN))
            return
        left_seconds = max(0.0, deadline - time.time())
        stop.wait(min(campaign.poll_seconds, left_seconds + LOOK_SECONDS))


def _answered(
    store: CampaignStore, number: int, end: float, stop: threading.Event, site: Site, line: _Line
) -> bool:
    """Whether a facility has said its last word; the loss is in the journal then."""
    journal, words = store.loss_journal(number), loss_request(store, number, site)

    how = _patience(store, end, stop, line)
    answer = bring(store, number + 1, site, words, journal, "--measure", **how)
    if answer["state"] in ("refused", "failed"):
        raise UserError(answer.get("why") or answer["state"], "see its run folder")
    if answer["state"] != "ready":
        return False
    losses = [loss for loss in answer.get("losses", []) if math.isfinite(loss)]
    facts = {"loss": losses[-1]} if losses else {"why": "it measured no loss"}
    journal.append("measured" if losses else "left out", facility=site.name, **facts)
    return True


def _patience(
    store: CampaignStore, end: float, stop: threading.Event, line: _Line
) -> dict[str, Any]:
    """When a question, and when a transfer, is waited for no longer."""

    def over(quiet_seconds: float) -> bool:  # one that is at work gives signs of life
        is_quiet = quiet_seconds > 60 * store.campaign.grace_minutes
        return stop.is_set() or is_quiet or time.time() > end

    def past(_: float) -> bool:  # rsync says nothing while it sends, and ends where nothing goes
        line.hear()
        return stop.is_set() or time.time() > end

    def sending() -> Over:
        line.hear()
        return past

    return {"over": over, "sending": sending}


def _missing(store: CampaignStore, journal: Journal) -> list[Site]:
    """Facilities that have neither measured nor failed."""
    settled = {r["facility"] for r in journal.since("began") if r["event"] in SETTLED}
    return [site for site in store.campaign.sites if site.name not in settled]
