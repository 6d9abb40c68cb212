"""The end of a round: its updates become the next model, or the rule says how it goes on."""

import json
import shutil
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.journal import alone
from atoll.campaign.store import CampaignStore
from atoll.campaign.transfer import atoll_here, run_atoll
from atoll.errors import UserError
from atoll.settings.exchange import read_manifest
from atoll.settings.federation import Site

MOST_WAIT_SECONDS = 1800.0
LET_GO, WRONG = ".update.let-go", ".update.wrong"  # on their way out


def average(store: CampaignStore, number: int, decides: bool = True) -> bool:
    """Give the updates to `atoll aggregate`, which writes the next model whole or not at all.

    Where too few are left, the rule says how it goes on; False: they are to be collected again.
    decides: False for the step of an engine, which would start it again: that is left as it is.
    """
    with alone(store.round(number)):
        if store.has_model(number):
            _note_what_was_made(store, number)
            return True
        for gone in store.round(number).glob(f"*/{WRONG}"):  # a kill came while it was removed
            shutil.rmtree(gone, ignore_errors=True)
        began, count = time.time(), len(store.updates(number))
        sites, quorum = store.campaign.sites, store.campaign.rule.quorum
        if count < quorum:
            left_out = "; ".join(sorted(store.left_out(number).values()))
            why = f"{count} of {len(sites)} facilities sent an update, the quorum is {quorum}"
            why += f" ({left_out})" if left_out else ""
            outcome: dict[str, Any] = {"short": why}
        else:
            outcome = _aggregate(store, number, store.updates(number))
        if "short" in outcome:
            if not decides:
                return False
            instead = _below_quorum(store, number, outcome)
            if instead is None:
                return False
            outcome = instead
    _note(store, number, outcome | {"seconds": time.time() - began})
    return True


def _note(store: CampaignStore, number: int, facts: dict[str, Any]) -> None:
    """How many facilities there are, too: some may leave, and the round's loss stays."""
    facts |= {"facilities": len(store.campaign.sites)}
    store.journal(number).append("averaged", **facts)


def _note_what_was_made(store: CampaignStore, number: int) -> None:
    """Of a model that was made while the coordinator was gone: it was killed, and not the maker."""
    journal, manifest = store.journal(number), store.model_manifest(number)
    if not journal.last("averaged"):
        names = ("weights", "norms", "cosines", "rejected", "unreadable", "held")
        _note(store, number, {name: manifest[name] for name in names if name in manifest})


def _aggregate(
    store: CampaignStore, number: int, folders: list[Path], **about: Any
) -> dict[str, Any]:
    """What `atoll aggregate` says; of no update at all, the model is held."""
    words = aggregate_words(store, number, folders, store.model(number), **about)
    outcome: dict[str, Any] = json.loads(
        run_atoll([*atoll_here(), *words], f"the model of round {number}")
    )
    return outcome


def aggregate_words(
    store: CampaignStore, number: int, folders: list[Path], out: Path, **about: Any
) -> list[str]:
    """The words by which `atoll aggregate` makes the model of a round, once or again."""
    campaign = store.campaign
    words = ["aggregate", *(map(str, folders) if folders else ["--hold"])]
    words += ["--base", str(store.model(number - 1)), "--out", str(out)]
    words += ["--codec", campaign.global_codec]
    words += [
        "--rule",
        campaign.rule.model_dump_json(),
        "--about",
        json.dumps({"round": number, **about}),
    ]
    for before in bases(store, number)[1:]:
        words += ["--older", store.model_manifest(before)["digest"]]
    return words


def bases(store: CampaignStore, number: int) -> list[int]:
    """The rounds whose models an update of this round may have begun from, the newest first."""
    rule = store.campaign.rule
    oldest = number - 1 - rule.max_staleness - rule.overlap_rounds
    return list(range(number - 1, max(-1, oldest - 1), -1))


def _ask_for_its_own(store: CampaignStore, number: int, sites: list[Site], why: str) -> None:
    """Late work that cannot make a round by itself is let go: the round's own is asked for."""
    store.journal(number).append("reopened", waits=True)
    for site in sites:
        update = store.update(number, site)
        nonce = read_manifest(update).nonce
        gone = update.with_name(LET_GO)
        shutil.rmtree(gone, ignore_errors=True)
        update.rename(gone)  # half of one would be taken for a damaged one
        run_dir.sync_folder(update.parent)
        # behind it: one that was let go is in no model
        store.journal(number).append("afresh", facility=site.name, why=why, nonce=nonce)
        shutil.rmtree(gone, ignore_errors=True)


def finish_letting_go(store: CampaignStore, number: int) -> None:
    """What a kill cut off: nobody may be asked again for late work that was let go."""
    noted = {record["facility"] for record in store.journal(number).records("afresh")}
    for gone in store.round(number).glob(f"*/{LET_GO}"):
        name = gone.parent.name
        if name not in noted:
            facts = {"facility": name, "why": "it was let go", "nonce": read_manifest(gone).nonce}
            store.journal(number).append("afresh", **facts)
        shutil.rmtree(gone, ignore_errors=True)


def held_words(outcome: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Whose updates were left out of a round that is held, why, and of which rounds these are."""
    return {name: outcome.get(name, {}) for name in ("rejected", "unreadable", "refused_rounds")}


def _leave_behind(store: CampaignStore, number: int, site: Site, why: str) -> None:
    """Remove an update that was left out; first it is counted: who has left is asked for no other.

    It is renamed before: half of one would be a damaged one, and the other of two alone a model.
    """
    store.count_failure(number, site, why)
    update = store.update(number, site)
    if update.is_dir():
        gone = update.with_name(WRONG)
        shutil.rmtree(gone, ignore_errors=True)
        update.rename(gone)
        run_dir.sync_folder(update.parent)
        shutil.rmtree(gone, ignore_errors=True)


def _below_quorum(
    store: CampaignStore, number: int, outcome: dict[str, Any]
) -> dict[str, Any] | None:
    """How a round with too few updates goes on: held, or (None) collected again.

    Updates that were left out are not kept. Raises `UserError` where a person has to look.
    """
    campaign, why = store.campaign, str(outcome["short"])
    if campaign.rule.below_quorum == "hold":
        held = held_words(outcome)
        return _aggregate(store, number, [], held=why, **held) | {"held": why}
    if too_late := [site for site in campaign.sites if site.name in outcome.get("too_late", [])]:
        _ask_for_its_own(store, number, too_late, why)
        return None
    wrong = outcome.get("rejected", {}) | outcome.get("unreadable", {})
    sites = {site.name: site for site in campaign.sites}
    for name in [name for name in wrong if name not in sites]:  # it has left the campaign since
        gone = Site(name=name, folder=name)
        _leave_behind(store, number, gone, wrong[name])
    for name in [name for name in wrong if name in sites]:
        _leave_behind(store, number, sites[name], wrong[name])
    if campaign.rule.below_quorum == "ask" and store.unsettled(number):
        return None
    waits, journal = campaign.rule.below_quorum == "wait", store.journal(number)
    reopened = reversed(journal.records("reopened"))
    before = list(takewhile(lambda record: record.get("waits"), reopened))
    journal.append("reopened", waits=waits, why=why)
    if waits:
        if not before or before[0].get("why") != why:
            print(f"round {number}: {why}: waiting for more", flush=True)
        # what is wrong comes again each time: less and less often, until it is typed again
        time.sleep(min(MOST_WAIT_SECONDS, campaign.poll_seconds * 2 ** min(len(before), 20)))
        return None
    can_hold = not (campaign.rule.overlap_rounds and campaign.rule.max_staleness)
    raise UserError(
        f"round {number}: {why}",
        "fix what --status names and type the same line again: nobody trains twice"
        + ("; or go on without them: rule.below_quorum=hold" if can_hold else ""),
    )
