"""How far a round is while its facilities train, and about how long the campaign still takes."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll import run_dir
from atoll.campaign.journal import round_name
from atoll.campaign.store import CampaignStore
from atoll.errors import UserError
from atoll.settings.exchange import tail_of_plain
from atoll.settings.federation import Site

FIRST_PAUSE_SECONDS = 10.0
TAIL_BYTES = 1 << 16
MOST_STEPS = 1 << 53
SHARE_OF_ELAPSED = 0.05  # a campaign of days says less often where it is
LAST_SECONDS = 5.0  # for a line that is being made: a file system may hang


@contextmanager
def shown(store: CampaignStore, number: int) -> Iterator[None]:
    """Print a line now and then until the round has its updates."""
    ended = threading.Event()
    speaking = threading.Thread(target=_speak, args=(store, number, ended), daemon=True)
    speaking.start()
    try:
        yield
    finally:
        ended.set()
        speaking.join(LAST_SECONDS)


def _speak(store: CampaignStore, number: int, ended: threading.Event) -> None:
    began, before = time.monotonic(), ""
    while True:
        elapsed = time.monotonic() - began
        if ended.wait(max(FIRST_PAUSE_SECONDS, SHARE_OF_ELAPSED * elapsed)):
            return
        with suppress(OSError, ValueError, UserError):  # files that are being made or removed
            line = progress_line(store, number, time.monotonic() - began)
            if line != before:
                print(line, flush=True)
            before = line


def progress_line(store: CampaignStore, number: int, elapsed_seconds: float) -> str:
    """Each facility's state or step, and what the rounds to come take at this one's rate."""
    sites = store.campaign.sites
    shares = {site.name: _share(store, number, site) for site in sites}
    parts = ", ".join(
        f"{site.name} {_place(store, number, site, shares[site.name])}" for site in sites
    )
    known = [1.0 if share is None else share for share in shares.values()]
    slowest = min(known, default=0.0)
    text = f"round {number}/{store.campaign.rounds}: {parts}"
    if any(share is None for share in shares.values()) or not slowest:
        return text
    left_seconds = elapsed_seconds * ((1 - slowest) + store.campaign.rounds - number) / slowest
    minutes, seconds = divmod(round(left_seconds), 60)
    return f"{text}; about {minutes}:{seconds:02d} left"


def _place(store: CampaignStore, number: int, site: Site, share: float | None) -> str:
    if share is None or store.state(number, site).settled:
        return store.state(number, site).text
    steps = store.steps(store.asked_round(number, site), site)
    return f"step {round(share * steps)}/{steps}"


def _share(store: CampaignStore, number: int, site: Site) -> float | None:
    """The part of its steps that it has done; None where its files are on another machine."""
    if site.host is not None:
        return None
    if store.state(number, site).settled:
        return 1.0
    asked = store.asked_round(number, site)  # it may still be at work that is late
    name = f"{store.campaign.name}-{round_name(asked)}-{site.name}"
    step = last_step(run_dir.metrics_file(Path(site.folder) / "runs" / name))
    return min(1.0, step / store.steps(asked, site))


def last_step(file: Path) -> int:
    """The last step in a facility's metrics, which may be of any length and hold anything."""
    try:
        lines = tail_of_plain(file, TAIL_BYTES).splitlines()
    except UserError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            is_train = isinstance(record, dict) and record.get("event") == "train"
            if is_train and isinstance(record.get("step"), int):
                return min(max(0, int(record["step"])), MOST_STEPS)
    return 0
