"""What a campaign would do, seen from a machine that has nothing of it."""

import socket
from pathlib import Path

import pytest
import yaml

from atoll.campaign.asked import training_words, without_bundle
from atoll.campaign.coordinator import main
from atoll.campaign.dry_run import dry_run
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.config.compose import campaign_values, compose, path_word
from atoll.errors import UserError

PRESET = "federation=leonardo_karolina"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, here: Path) -> Path:
    """No network, no cache of the hub, an empty folder."""

    def refuse(*_: object) -> None:
        raise AssertionError("a dry run asks nobody")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HOME", str(here / "no-cache"))
    return here


def test_the_preset_can_begin_where_nothing_is(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", PRESET]) == 0
    output = capsys.readouterr().out
    assert yaml.safe_load(output)["rounds"] == 5, "the settings can be read back"
    first, *sites = [line for line in output.splitlines() if line.startswith("# ")]
    assert "meta-llama/Llama-2-7b-hf, 6.74 billion parameters, 25.1 GiB" in first
    assert "8 nodes x 4 ranks of leonardo" in sites[0] and "clean_mc4_it" in sites[0]
    assert "tokens from the bundle /WORK/atoll-bundles/llama2_7b_it" in sites[1]
    assert "4 nodes x 8 ranks of karolina" in sites[2] and "mc4_cs" in sites[2]
    assert list(alone.iterdir()) == []


def test_every_preset_names_a_bundle_where_nodes_have_no_network(tree: Path) -> None:
    for file in (tree / "federation").glob("*.yaml"):
        campaign = checked_campaign(campaign_values([f"federation={file.stem}"], tree))
        for site in campaign.sites:
            words = [*training_words(campaign, 1, site, 1, 0), "model.source=hub/model"]
            kept = [word for word in words if not word.startswith("folders.bundle=")]
            offline = compose(kept, tree).run.facility.node_network is False
            assert not offline or kept != words, f"{file.name}: {site.name}"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (["training.microbatch_samples=7"], "leonardo: .*must be divisible"),
        (["sharding.tensor=64"], "karolina: .*32"),
        (["facility.walltime_minutes=9000"], "karolina: .* allows 2880 minutes"),
        (["facility.walltme_minutes=9"], "karolina: .*walltme"),
    ],
)
def test_what_a_facility_cannot_run_is_found_here(
    alone: Path, changes: list[str], found: str
) -> None:
    values = campaign_values([PRESET])
    values["sites"]["leonardo" not in found]["overrides"] += changes
    with pytest.raises(UserError, match=found):
        dry_run(CampaignStore(checked_campaign(values), alone / "c"))


def test_facilities_of_the_same_text_take_its_samples_in_orders_of_their_own() -> None:
    campaign = checked_campaign(campaign_values([PRESET]))
    words = [training_words(campaign, 1, site, 1, 0) for site in campaign.sites]
    own = ["name=r", "model.source=here"]
    seeds = [compose([*without_bundle(each)[0], *own]).run.order_seed for each in words]
    assert len(set(seeds)) == 2 and seeds == [int(each[0].partition("=")[2]) for each in words]
    other = campaign.model_copy(update={"train": ["training.data_seed=7"]})
    words = without_bundle(training_words(other, 1, campaign.sites[0], 1, 0))[0]
    assert compose([*words, *own]).run.order_seed == 7, "as the campaign says"


def test_a_start_that_the_rounds_cannot_go_on_from_is_refused(alone: Path) -> None:
    values = campaign_values([PRESET])
    values["start"] = ["facility=laptop", "model.mup.base_width=64"]
    with pytest.raises(UserError, match=r"model.mup.base_width=64 in the campaign's start"):
        dry_run(CampaignStore(checked_campaign(values), alone / "c"))


def test_paths_of_any_letters_are_read_back(here: Path) -> None:
    folder = here / "größe, 'x' = [1]"
    run = compose(["facility=laptop", path_word("folders.runs", folder)]).run
    assert run.folders.runs == folder
