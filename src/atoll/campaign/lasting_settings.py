"""The settings that a campaign is begun with, of which few may change in its life."""

import json
import math
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.campaign.same_training import is_same_training
from atoll.campaign.signing import refuse_locked, refuse_unknown
from atoll.campaign.store import CampaignStore, checked_campaign, read_settings, settings_file
from atoll.errors import UserError
from atoll.settings.federation import Campaign

# What may change in a campaign's life: its length, our patience, and how it is carried out.
FREE = {"rounds", "deadline_minutes", "poll_seconds", "attempts", "target_loss", "ssh_options"}
FREE |= {"engine", "signing_key", "grace_minutes", "rule.below_quorum"}
FREE |= {"last_loss", "keep_checkpoints"}
# how a facility is reached, and what it signs with
FREE_OF_SITES = ("host", "command", "signing_key")
OF_SITES = "sites."  # settings of one facility
TRAIN = "train"  # words of every facility's runs
NORMALISED = ("adam", "yogi")  # their step is as long as the rate, for every weight
NORMALISED_RATE, MOST_NORMALISED_RATE = 0.003, 0.1


def has_begun(store: CampaignStore) -> bool:
    """With its first model; until then a mistyped line may be mended."""
    return store.has_model(0) and settings_file(store.folder).is_file()


def refuse_what_loses(store: CampaignStore) -> None:
    """Of a campaign that has not begun; one that has goes on as it was begun."""
    rule, codec = store.campaign.rule, store.campaign.codec
    _refuse_target_of_own_weights(store)
    if has_begun(store):
        return
    _refuse_small_cap(store.campaign)
    if codec == "int2" and rule.update != "replace":
        raise UserError(
            f"codec=int2 with rule.update={rule.update}: with nesterov it learns less than with "
            "replace in rounds of 10 steps and no more than seeds differ by in longer ones, with "
            "the others far less (docs/atlas.md)",
            "codec=int4, or rule.update=replace",
        )
    if rule.merge_alpha and rule.min_cosine > -1.0:
        raise UserError(
            f"rule.merge_alpha={rule.merge_alpha:g} with rule.min_cosine={rule.min_cosine:g}: what "
            "facilities keep of their own points away from each other, so that honest ones would "
            "be left out",
            "rule.min_cosine=-1: updates that are too long are left out as ever; or "
            "rule.merge_alpha=0",
        )
    if rule.fragments > store.campaign.rounds:
        raise UserError(
            f"rule.fragments={rule.fragments} in rounds={store.campaign.rounds}: one travels in a "
            f"round, so {rule.fragments - store.campaign.rounds} of them would never be averaged",
            f"rounds={rule.fragments} or a multiple of it, or fewer fragments",
        )
    if rule.max_staleness and rule.combine != "mean":
        raise UserError(
            f"rule.max_staleness={rule.max_staleness} with rule.combine={rule.combine}, which "
            "takes late work for as much as work in time",
            "rule.combine=mean, or rule.max_staleness=0",
        )
    if rule.update in NORMALISED and rule.learning_rate > MOST_NORMALISED_RATE:
        raise UserError(
            f"rule.update={rule.update} with rule.learning_rate={rule.learning_rate:g}: that is "
            "about how far every single weight moves in a round, whatever facilities send",
            f"rule.learning_rate={NORMALISED_RATE:g}, and no more than {MOST_NORMALISED_RATE:g}",
        )


def _refuse_target_of_own_weights(store: CampaignStore) -> None:
    """Also one that comes later; an older campaign's, that has it from the beginning, is left."""
    rule, target = store.campaign.rule, store.campaign.target_loss
    kept = read_settings(settings_file(store.folder)) or {}
    if not rule.keeps_own_weights or target in (None, kept.get("target_loss")):
        return
    raise UserError(
        f"target_loss={target:g} with rule.fragments={rule.fragments}, "
        f"rule.merge_alpha={rule.merge_alpha:g}: facilities say the loss of weights of their "
        "own, and not the model's",
        "target_loss=null, and rounds=N; or rule.fragments=1 and rule.merge_alpha=0",
    )


def _refuse_small_cap(campaign: Campaign) -> None:
    """Where facilities leave later all weigh the same, which is no reason to stay."""
    rule, count = campaign.rule, len(campaign.sites)
    if rule.weigh == "capped" and count > 1 and rule.cap * count < 1.0:
        raise UserError(
            f"rule.cap={rule.cap} of {count} facilities is less than all: {1 / count:.3f}",
            f"rule.cap={math.ceil(1000 / count) / 1000:g} or more; or rule.weigh=equal",
        )


def refuse_missing_keys(campaign: Campaign) -> None:
    """What signatures are made and checked with is named; what is to be here is, and serves."""
    if campaign.allowed_signers is not None:
        for site in campaign.sites:
            if site.signing_key is None:
                raise UserError(
                    f"allowed_signers={campaign.allowed_signers}, and {site.name} has no key",
                    "name a key there: sites[…].signing_key, or set allowed_signers=null",
                )
    for name in ("allowed_signers", "signing_key"):
        path = getattr(campaign, name)
        if path is not None and not Path(path).expanduser().is_file():
            raise UserError(f"{name}={path}: no such file here", f"make it, or set {name}=null")
    if campaign.allowed_signers is not None:
        for site in campaign.sites:
            refuse_unknown(site.name, Path(campaign.allowed_signers).expanduser())
    if campaign.signing_key is not None:
        refuse_locked(Path(campaign.signing_key).expanduser())


def changed_settings(begun: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """What may not change in a campaign's life, and did: its name, before and now."""
    before, wanted = _flat(begun), _flat(now)
    return [
        (name, before[name], value)
        for name, value in wanted.items()
        if name not in FREE and not _is_same(name, before.get(name, value), value)
    ]


def _is_same(name: str, before: Any, now: Any) -> bool:
    """Equal, or words of runs that differ in how they are carried out alone."""
    if name == TRAIN:
        return is_same_training(before, now)
    if not name.startswith(OF_SITES) or before == now:
        return bool(before == now)
    others = [{**site, "overrides": []} for site in (before, now)]
    return others[0] == others[1] and is_same_training(before["overrides"], now["overrides"])


def settings_to_keep(store: CampaignStore) -> dict[str, Any]:
    """The settings that a campaign goes on with: only those in FREE may change in its life.

    It has begun with its first model, and a facility with the first work that it took. With what it
    was begun with where a setting is left open: its schedule's length.
    """
    campaign, kept = store.campaign, read_settings(settings_file(store.folder))
    if kept is None or not store.has_model(0):
        kept = campaign.model_dump(mode="json")
    begun = checked_campaign(kept).model_dump(mode="json")  # an older Atoll's has fewer words
    span = campaign.schedule_rounds or begun.get("schedule_rounds") or begun["rounds"]
    now = campaign.model_copy(update={"schedule_rounds": span}).model_dump(mode="json")
    begun |= {"schedule_rounds": begun.get("schedule_rounds") or span}
    for name, before, wanted in changed_settings(begun, now):
        if name.startswith(OF_SITES) and not store.has_worked(name.removeprefix(OF_SITES)):
            continue
        raise UserError(
            f"campaign {campaign.name} was begun with {name}={before}, now it is {wanted}",
            "type it as it was begun; another campaign has another name=, and sites[].folder",
        )
    return now


def keep_settings(store: CampaignStore) -> CampaignStore:
    """A campaign keeps its settings: what it goes on with stands in its folder."""
    now = settings_to_keep(store)
    try:
        run_dir.write_whole(settings_file(store.folder), json.dumps(now, indent=1))
    except OSError as error:
        raise unwritable(store, error) from None
    return CampaignStore(checked_campaign(now), store.folder)


def unwritable(store: CampaignStore, error: OSError) -> UserError:
    """What is said where a campaign's folder cannot be made or written."""
    found = f"{store.folder} cannot be written: {error.strerror}"
    return UserError(found, "give the campaign another place here: folder=FOLDER")


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """The rule's settings by themselves, and each facility: one may join, and one may leave.

    How a facility is reached is its own matter.
    """
    rule = {f"rule.{name}": value for name, value in values.get("rule", {}).items()}
    sites = {
        f"{OF_SITES}{site['name']}": {n: x for n, x in site.items() if n not in FREE_OF_SITES}
        for site in values["sites"]
    }
    others = {name: value for name, value in values.items() if name not in ("rule", "sites")}
    return others | rule | sites
