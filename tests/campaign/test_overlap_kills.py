"""The coordinator killed wherever it may be while rounds of fragments overlap: the same models."""

import shutil
from pathlib import Path

import pytest
from drawn_campaign import Facilities, Killed, begun, campaign_values

from atoll.__main__ import main
from atoll.campaign import coordinator
from atoll.campaign.journal import round_name
from atoll.campaign.store import CampaignStore, checked_campaign

RULE = {"fragments": 2, "overlap_rounds": 1, "merge_alpha": 0.5, "update": "nesterov"}
RULE |= {"learning_rate": 0.7, "max_norm_ratio": 1e6}


def digests(folder: Path, patch: pytest.MonkeyPatch, kill_at: int = 0) -> tuple[list[str], int]:
    """Of the models of four rounds, and how many things the coordinator did before it was done."""
    values = campaign_values(folder, rule=RULE)
    store = begun(folder, values)
    facilities = Facilities(kill_at=kill_at)
    facilities.put_in_place(patch)
    try:
        coordinator.run(store)
    except Killed:  # goes on, and whoever types the line again changes what may change
        later = values | {"rule": RULE | {"below_quorum": "hold"}}
        coordinator.run(CampaignStore(checked_campaign(later), folder / "c"))
    assert not store.left_out(1) and len(store.updates(4)) == 2
    return [store.model_manifest(n)["digest"] for n in range(5)], facilities.done


def test_killed_anywhere_it_goes_on_to_the_same_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, things = digests(tmp_path / "whole", monkeypatch)
    assert len(set(whole)) == 5 and things > 30
    for kill_at in range(2, things, 7):
        killed, _ = digests(tmp_path / str(kill_at), monkeypatch, kill_at)
        assert killed == whole, f"killed at {kill_at} of {things}"
    capsys.readouterr()
    Facilities().put_in_place(monkeypatch)
    for name in ("whole", str(kill_at)):
        model = tmp_path / name / "c" / round_name(4) / "global"
        assert main(["verify", str(model / "export")]) == 0
        output = capsys.readouterr().out
        for number in range(1, 5):
            assert f"round {number}: aggregated again, bit for bit (2)" in output
    # an update that was deleted, and is fetched again from its facility
    kept = tmp_path / name / "c" / round_name(2) / "north" / "update"
    shutil.rmtree(kept)
    again = ["verify", str(model / "export"), "--round", "2"]
    assert main(again) == 0 and "not at hand  round 2: what its aggr" in capsys.readouterr().out
    shutil.copytree(tmp_path / name / "north" / "rounds" / round_name(2) / "update", kept)
    assert main(again) == 0
    assert "round 2: aggregated again, bit for bit (2)" in capsys.readouterr().out
