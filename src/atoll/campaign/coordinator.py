"""`atoll federate federation=NAME`: several facilities train one model, round after round.

What is done is read from which files are whole (campaign.py). Killed at any moment and started
again, a campaign goes on where it was: a facility is asked the same question, and does nothing
twice.
"""

import time
from pathlib import Path

from omegaconf import OmegaConf

from atoll.campaign import store as state
from atoll.campaign import streamflow
from atoll.campaign.round import average, begin, go_on
from atoll.campaign.store import CampaignStore, checked_campaign, is_whole
from atoll.config.compose import campaign_values, split_options

USAGE = """usage: atoll federate [--status] [--dry-run] federation=NAME KEY=VALUE …

Rounds of training at the facilities of a federation, averaged on this machine. The same line
typed again goes on where it stopped.
--status     where the campaign stands, round by round
--dry-run    print the settings, and do nothing"""


def main(argv: list[str]) -> int:
    """Begin a campaign, or go on with it."""
    options, overrides = split_options(argv, {"--status", "--dry-run", "--help", "-h"})
    if options & {"--help", "-h"}:
        print(USAGE)
        return 0
    campaign = checked_campaign(campaign_values(overrides))
    held = CampaignStore(campaign, Path(campaign.folder).absolute() / campaign.name)
    if "--dry-run" in options:
        print(OmegaConf.to_yaml(campaign.model_dump(mode="json")), end="")
        return 0
    if "--status" in options:
        print("\n".join(state.standing(held)))
        return 0
    return run(held)


def run(held: CampaignStore) -> int:
    """Every round that is not done yet, by the campaign's engine."""
    campaign, one_round = held.campaign, ENGINES[held.campaign.engine]
    state.keep_settings(held)
    begin(held)
    last = campaign.rounds
    for number in range(1, last + 1):
        if not is_whole(held.model(number)):
            state.started(held, number)
            one_round(held, number)
        print(state.told(held, number), flush=True)
        if _reached_target(held, number):
            print(f"the target loss {campaign.target_loss} is reached", flush=True)
            last = number
            break
    print(f"the model: {held.model(last) / 'export'}")
    return 0


def local(held: CampaignStore, number: int) -> None:
    """Ask every facility, again and again, until it has sent its update or the time is over."""
    while waiting := state.unsettled(held, number):
        before = [state.last_words(held, number, site) for site in waiting]
        for site in waiting:
            go_on(held, number, site)
        if time.time() > state.deadline(held, number):
            state.leave_out_late(held, number)
        elif before == [state.last_words(held, number, site) for site in waiting]:
            time.sleep(held.campaign.poll_seconds)
    average(held, number)


def _reached_target(held: CampaignStore, number: int) -> bool:
    target, mean = held.campaign.target_loss, state.mean_losses(held, number)
    return target is not None and mean is not None and mean[0] <= target


# engine -> how it does one round; a round that is cut off is done again from where it was.
ENGINES = {"local": local, "streamflow": streamflow.one_round}
