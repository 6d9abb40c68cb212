"""`atoll federate federation=NAME`: several facilities train one model, round after round.

What is done is read from which folders are whole and from each round's journal (journal.py).
Killed at any moment and started again, a campaign goes on where it was: a facility is asked the
same question, and does nothing twice.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from atoll.campaign import streamflow
from atoll.campaign.average import average
from atoll.campaign.calls import LOOK_SECONDS, Over, never
from atoll.campaign.dry_run import dry_run
from atoll.campaign.first_model import make_first_model, merge_adapter
from atoll.campaign.journal import alone
from atoll.campaign.last_loss import measure_last
from atoll.campaign.progress import shown
from atoll.campaign.prove import prove_campaign
from atoll.campaign.round import go_on
from atoll.campaign.steps_by_queue import choose_steps
from atoll.campaign.store import CampaignStore, checked_campaign, keep_settings
from atoll.commands import VerbParser
from atoll.config.compose import campaign_values
from atoll.proof.statement import NAME
from atoll.settings.federation import Site

ABOUT = """Rounds of training at the facilities of a federation, averaged on this machine. The same
command run again goes on where it stopped."""
QUICK_QUESTIONS = 50  # of a facility in a round, where each answer is another: then no more


def main(argv: list[str]) -> int:
    """Begin a campaign, or go on with it."""
    parser = VerbParser("federate", ABOUT)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="federation=NAME, …")
    parser.add_argument("--status", action="store_true", help="where it stands, round by round")
    parser.add_argument("--dry-run", action="store_true", help="compose, check, print, no more")
    arguments = parser.read(argv)
    campaign = checked_campaign(campaign_values(arguments.overrides))
    store = CampaignStore(campaign, Path(campaign.folder).absolute() / campaign.name)
    if arguments.dry_run:
        print(dry_run(store), end="")
    elif arguments.status:
        print("\n".join(status_lines(store)))
    else:
        return run(store)
    return 0


def run(store: CampaignStore) -> int:
    """Every round that is not done yet, by the campaign's engine."""
    store = keep_settings(store)
    campaign, collect = store.campaign, ENGINES[store.campaign.engine]
    make_first_model(store)
    last = campaign.rounds
    for number in range(1, last + 1):
        while not store.has_model(number):
            choose_steps(store, number)
            with shown(store, number):
                collect(store, number)
            average(store, number)
        print(round_line(store, number), flush=True)
        if _reached_target(store, number):
            print(f"the target loss {campaign.target_loss} is reached", flush=True)
            last = number
            break
    if campaign.last_loss and not store.mean_losses(last + 1):  # else a later round did
        measure_last(store, last)
        print(last_line(store, last), flush=True)
    export = store.export(last)
    with alone(store.round(last)):
        if not export.is_dir():
            merge_adapter(store, store.model(last) / "master", export)
        if not (export / NAME).is_file():
            prove_campaign(store, last)
    print(f"the model: {export}")
    return 0


def collect_here(store: CampaignStore, number: int) -> None:
    """Ask every facility, again and again, until it has sent its update or the time is over.

    Side by side: one that hangs takes nobody else's time.
    """
    store.deadline(number)  # the clock starts
    waiting, stop = store.unsettled(number), threading.Event()
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        running = [pool.submit(_ask_until_settled, store, number, site, stop) for site in waiting]
        try:
            for each in as_completed(running):
                each.result()
        finally:
            stop.set()
    store.leave_out_late(number)


def _ask_until_settled(
    store: CampaignStore, number: int, site: Site, stop: threading.Event
) -> None:
    for seconds in questions(store, number, site, lambda _: stop.is_set()):
        if stop.wait(seconds):
            return


def questions(
    store: CampaignStore, number: int, site: Site, stopped: Over = never
) -> Iterator[float]:
    """Ask a facility until it has sent its update or the time is over; the seconds between two.

    Up to the deadline, and once after it: what is ready then is not lost.
    """
    deadline, quick = store.deadline(number), 0
    while not stopped(0.0):
        before = store.state(number, site).text
        go_on(store, number, site, stopped)
        state = store.state(number, site)
        if state.settled or time.time() > deadline:
            return
        quick += 1
        waits = state.text == before or quick > QUICK_QUESTIONS
        left = max(0.0, deadline - time.time())
        yield min(store.campaign.poll_seconds, left + LOOK_SECONDS) if waits else 0.0


# engine -> how it gets the updates of one round; cut off, it goes on from where it was
ENGINES = {"local": collect_here, "streamflow": streamflow.collect}


def _reached_target(store: CampaignStore, number: int) -> bool:
    """Of the upper half of what the facilities say: none of two ends a campaign by itself."""
    target, losses = store.campaign.target_loss, store.losses(number)
    first = sorted(loss[0] for loss in losses)
    return target is not None and bool(first) and first[len(first) // 2] <= target


def status_lines(store: CampaignStore) -> list[str]:
    """A line for each round that has begun, and one for each facility of the last."""
    begun = store.begun_rounds()
    lines = [f"{store.campaign.name}: {store.campaign.rounds} rounds in {store.folder}"]
    lines += [round_line(store, number) for number in begun]
    if begun and store.loss_journal(begun[-1]).records():
        lines.append(last_line(store, begun[-1]))
    if begun and not store.has_model(begun[-1]):
        for site in store.campaign.sites:
            lines.append(f"  {site.name}: {store.state(begun[-1], site).text}")
    return lines


def last_line(store: CampaignStore, number: int) -> str:
    """The held-out loss of the model that the campaign ends with, and who did not say it."""
    loss, journal = store.global_loss(number), store.loss_journal(number)
    text = "not measured" if loss is None else f"loss {loss:.4f} (mean over facilities)"
    left_out = {record["facility"]: record["why"] for record in journal.records("left out")}
    without = "".join(f"; without {name}: {why}" for name, why in sorted(left_out.items()))
    return f"the model of round {number}: {text}{without}"


def round_line(store: CampaignStore, number: int) -> str:
    """Where one round stands."""
    if not store.has_model(number):
        return f"round {number}: under way"
    shares = store.model_manifest(number)["weights"].items()
    weights = ", ".join(f"{name} {share:.2f}" for name, share in shares) or "none: it is held"
    missing = sorted(store.without(number).items())
    without = "".join(f"; without {name}: {why}" for name, why in missing)
    mean = store.mean_losses(number)
    losses = f"loss {mean[0]:.4f}, after training {mean[1]:.4f}" if mean else "no losses"
    return f"round {number}: {losses} (mean over facilities); weights {weights}{without}"
