"""`engine=local`: every facility is asked from here, side by side, until it has sent its update.

Where rounds overlap (`rule.overlap_rounds`), one that has sent its update is asked for the next
round while others are still at this one.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from atoll.campaign.calls import LOOK_SECONDS, Over, never
from atoll.campaign.round import go_on
from atoll.campaign.steps_by_queue import choose_steps
from atoll.campaign.store import CampaignStore
from atoll.settings.federation import Site

QUICK_QUESTIONS = 50  # of a facility in a round, where each answer is another: then no more
Collect = Callable[[CampaignStore, int], None]


def collect_here(store: CampaignStore, number: int, end: float | None = None) -> None:
    """Ask every facility, again and again, until it has sent its update or the time is over.

    Side by side: one that hangs takes nobody else's time. end: of the grace, where it was begun
    elsewhere.
    """
    store.deadline(number)  # the clock starts
    waiting, stop = store.unsettled(number), threading.Event()
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        running = [
            pool.submit(_ask_until_settled, store, number, site, stop, end) for site in waiting
        ]
        try:
            for each in as_completed(running):
                each.result()
        finally:
            stop.set()
    store.leave_out_late(number)


def _ask_until_settled(
    store: CampaignStore,
    number: int,
    site: Site,
    stop: threading.Event,
    end: float | None = None,
) -> None:
    for seconds in questions(store, number, site, lambda _: stop.is_set(), end):
        if stop.wait(seconds):
            return


def questions(
    store: CampaignStore,
    number: int,
    site: Site,
    stopped: Over = never,
    end: float | None = None,
) -> Iterator[float]:
    """Ask a facility until it has sent its update or the time is over; the seconds between two.

    Up to the deadline, and once after it: what is ready then is not lost.
    """
    quick = 0
    while not stopped(0.0):
        before = store.state(number, site).text
        go_on(store, number, site, stopped, end)
        state = store.state(number, site)
        deadline = store.deadline(number)  # it may have moved: see there
        if state.settled or time.time() > deadline:
            return
        quick += 1
        is_wrong = state.answer.get("state") == "wrong"  # what mends itself takes some time
        waits = is_wrong or state.text == before or quick > QUICK_QUESTIONS
        left_seconds = max(0.0, deadline - time.time())
        yield min(store.campaign.poll_seconds, left_seconds + LOOK_SECONDS) if waits else 0.0


@contextmanager
def overlapped(store: CampaignStore) -> Iterator[Collect]:
    """Gives what collects a round while facilities that are done with it go on with the next."""
    count = len(store.campaign.sites) * (1 + store.campaign.rule.overlap_rounds)
    with ThreadPoolExecutor(count) as pool:
        asking = _Asking(pool)
        try:
            yield asking.collect
        finally:
            asking.stop.set()


@dataclass
class _Asking:
    """Who is being asked for which round."""

    pool: ThreadPoolExecutor
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)
    running: dict[tuple[int, str], Future[None]] = field(default_factory=dict)

    def collect(self, store: CampaignStore, number: int) -> None:
        store.deadline(number)  # the clock starts
        for site in store.campaign.sites:
            self._begin(store, number, site)
        with self.lock:
            running = [asked for (of_round, _), asked in self.running.items() if of_round == number]
        for ended in wait(running, return_when=FIRST_EXCEPTION).done:
            ended.result()
        store.leave_out_late(number)

    def _begin(self, store: CampaignStore, number: int, site: Site) -> None:
        """Ask for the first round from this one on that the facility has not sent and may begin."""
        for each in range(number, store.campaign.rounds + 1):
            sent_before = each == number or store.update(each - 1, site).is_dir()
            if not sent_before or not store.has_model(store.global_round(each)):
                return
            if not store.state(each, site).settled:
                self._ask(store, each, site)
                return

    def _ask(self, store: CampaignStore, number: int, site: Site) -> None:
        with self.lock:
            before = self.running.get((number, site.name))
            if self.stop.is_set() or (before is not None and not before.done()):
                return
            choose_steps(store, number)
            asked = self.pool.submit(self._ask_and_go_on, store, number, site)
            self.running[number, site.name] = asked

    def _ask_and_go_on(self, store: CampaignStore, number: int, site: Site) -> None:
        _ask_until_settled(store, number, site, self.stop)
        if store.update(number, site).is_dir():
            self._begin(store, number + 1, site)
