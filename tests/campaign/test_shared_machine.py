"""Facilities of one machine without a scheduler share its cores."""

from pathlib import Path

import pytest

from atoll.campaign.asked import request
from atoll.campaign.site import threads_of_ranks
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.config.compose import campaign_values, compose


@pytest.mark.parametrize(
    ("facilities", "ranks", "cores", "threads"),
    [(3, 1, 2, "1"), (3, 2, 64, "10"), (2, 1, 64, "32")],
)
def test_their_ranks_have_a_share_of_the_cores(facilities, ranks, cores, threads):
    run = compose(("facility=laptop", f"ranks_per_node={ranks}")).run
    assert threads_of_ranks(run, facilities, cores) == {"OMP_NUM_THREADS": threads}


def test_one_alone_and_those_with_a_scheduler_have_what_they_have():
    assert threads_of_ranks(compose(("facility=laptop",)).run, 1, 64) == {}
    assert threads_of_ranks(compose(("facility=leonardo",)).run, 3, 64) == {}


def test_a_facility_is_told_how_many_are_on_its_machine(monkeypatch):
    monkeypatch.setattr(CampaignStore, "model_manifest", lambda store, number: {"digest": "0" * 64})
    monkeypatch.setattr(CampaignStore, "global_round", lambda store, number: number - 1)
    campaign = checked_campaign(campaign_values(["federation=demo"]))
    away = campaign.sites[0].model_copy(update={"host": "login.example.org"})
    campaign = campaign.model_copy(update={"sites": [away, *campaign.sites[1:]]})
    store = CampaignStore(campaign, Path("campaigns/demo"))
    told = [request(store, 1, site)["facilities_here"] for site in campaign.sites]
    assert told == [1, 2, 2]
