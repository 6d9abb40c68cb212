"""How long a sample at a facility is: the bound of the tokens that its update may claim."""

from pathlib import Path

import pytest

from atoll.campaign.asked import refuse_unknown_samples, sequence_tokens
from atoll.campaign.coordinator import main
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.errors import UserError

KNOWN = ["facility=laptop", "data=python_stdlib"]
THEIRS = ["facility=their_own", "data=theirs"]


def store_of(folder: Path, words: list[str], train: list[str] | None = None) -> CampaignStore:
    site = {"name": "north", "folder": "x", "overrides": words}
    values = {"name": "c", "sites": [site], "start": [], "train": train or []}
    return CampaignStore(checked_campaign(values), folder)


@pytest.mark.parametrize(
    "words",
    [KNOWN, THEIRS, [*KNOWN, "ranks_per_node=7"], ["data.sequence_tokens=64", *THEIRS]],
)
def test_it_is_what_the_settings_say_whether_or_not_they_compose_here(
    tmp_path: Path, words: list[str]
) -> None:
    store = store_of(tmp_path, [*words, "data.sequence_tokens=32"])
    assert sequence_tokens(store.campaign, store.campaign.sites[0]) == 32
    store = store_of(tmp_path, words, train=["data.sequence_tokens=32"])
    last = 64 if "data.sequence_tokens=64" in words else 32
    assert sequence_tokens(store.campaign, store.campaign.sites[0]) == last


@pytest.mark.parametrize("words", [THEIRS, [*THEIRS, "data.sequence_tokens=many"]])
def test_where_nobody_says_it_no_campaign_begins(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UserError, match="a sample at north is, is not known here") as error:
        refuse_unknown_samples(store_of(tmp_path, words))
    assert "overrides of north: data.sequence_tokens=N" in error.value.hint
    sites = "sites=[{name:north,folder:x,overrides:['facility=their_own']}]"
    line = ["federation=demo", "name=c", sites, "start=[]", "train=[]", f"folder={tmp_path}"]
    with pytest.raises(UserError, match="is not known here"):
        main(line)
    assert not (tmp_path / "c").exists()
