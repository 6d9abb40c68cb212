"""Runs that a campaign cannot be made of: each round is a run of its own, with a beginning.

What such settings mean depends on the weights that a run begins with, or on its only beginning: in
rounds they would do something else, and nobody would be told.
"""

import os
from collections.abc import Sequence

from atoll.campaign.asked import composed_here, words_here
from atoll.campaign.lasting_settings import has_begun
from atoll.campaign.store import CampaignStore
from atoll.config.compose import AUTO, compose, config_tree, groups, settings_of
from atoll.errors import UserError
from atoll.settings import Run
from atoll.settings.check import is_setting
from atoll.settings.suggestions import unknown_setting


def refuse_what_cannot_compose(store: CampaignStore) -> None:
    """Of a new campaign: else its first model is sent before a facility says so.

    Another clone's local/ may give other nodes and sizes: of those, names alone are judged.
    """
    for site in [] if has_begun(store) else store.campaign.sites:
        if composed_here(store.campaign, site) is not None:
            continue
        words = words_here(store.campaign, site)
        try:
            if site.host is not None or site.command:
                _refuse_unknown_names(words)
            elif _is_all_here(words):
                compose(words)
        except UserError as error:
            raise UserError(f"{site.name}: {error.found}", error.hint) from None


def _is_all_here(words: Sequence[str]) -> bool:
    """Whether this clone has every choice; other files, and variables, are a facility's own.

    `sharding=auto` is chosen by the model, which is not there yet.
    """
    if any("${" in word or word == AUTO for word in words):
        return False
    offered, has_facility = groups(config_tree()), False
    for name, value, is_choice in settings_of(words):
        has_facility = has_facility or name == "facility"  # else its own local/ chooses one
        if isinstance(value, str):
            is_away = "/" in value and not os.path.exists(os.path.expanduser(value))
            if is_away or (name in offered and not is_choice):
                return False
    return has_facility


def _refuse_unknown_names(words: Sequence[str]) -> None:
    """Raise `UserError` where a word names what no Atoll of this version knows."""
    offered = groups(config_tree())
    for name, _, _ in settings_of(words):
        if name not in offered and not is_setting(name):
            raise unknown_setting(name, offered)


def refuse_unsuited_runs(store: CampaignStore) -> None:
    """Of all facilities whose settings this machine's clone knows; the others refuse their own."""
    for site in store.campaign.sites:
        run = composed_here(store.campaign, site)
        if run is not None:
            try:
                refuse_unsuited(run, store.campaign.lora is not None)
            except UserError as error:
                raise UserError(f"{site.name}: {error.found}", error.hint) from None


def refuse_unsuited(run: Run, adapters_travel: bool) -> None:
    """Raise `UserError` where a facility's run learns something else in rounds."""
    quantisation = run.model.quantisation
    if quantisation != "none" and not adapters_travel:
        raise UserError(
            f"model.quantisation={quantisation} where whole models travel: each round would round "
            "the weights again, and lose what the last one learned",
            "lora.rank=16 of the campaign: adapters alone travel; or model.quantisation=none",
        )
    if run.task.name == "preference" and run.task.loss == "dpo":
        raise UserError(
            "task.loss=dpo in rounds: its reference is the model that a run begins with, which is "
            "another in each round",
            "task.loss=simpo, which has none",
        )


def refuse_unsuited_start(run: Run) -> None:
    """Raise `UserError` where the rounds could not go on as the first model was drawn."""
    if (width := run.model.mup.base_width) is not None:
        raise UserError(
            f"model.mup.base_width={width} in the campaign's start: rounds train a model that is "
            "there, with one rate for all of it",
            "model.mup.base_width=null",
        )
