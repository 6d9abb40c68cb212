"""A round that is under way says which step each facility is at, and about how long it takes."""

import json
import os
from pathlib import Path

import pytest

from atoll.campaign.progress import last_step, progress_line
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.config.compose import campaign_values


def store_here(*words):
    campaign = checked_campaign(
        campaign_values(["federation=demo", "name=c", "rounds=3", "steps=30", *words])
    )
    return CampaignStore(campaign, Path("campaigns") / "c")


def write_steps(store, name, *steps):
    file = Path("sites") / name / "runs" / f"c-round-001-{name}" / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    lines = [{"event": "start", "step": 0}, *({"event": "train", "step": n} for n in steps)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_steps_and_the_time_that_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = store_here()
    assert (
        progress_line(store, 1, 5.0) == "round 1/3: north step 0/30, east step 0/30, west step 0/30"
    )
    for name, steps in {"north": (10, 20), "east": (15,), "west": (30,)}.items():
        write_steps(store, name, *steps)
    expected = "round 1/3: north step 20/30, east step 15/30, west step 30/30; about 2:30 left"
    assert progress_line(store, 1, 30.0) == expected


def test_a_facility_elsewhere_has_its_state_and_no_time_is_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = store_here()
    away = store.campaign.sites[0].model_copy(update={"host": "login.example.org"})
    sites = [away, *store.campaign.sites[1:]]
    store = CampaignStore(store.campaign.model_copy(update={"sites": sites}), store.folder)
    write_steps(store, "east", 15)
    line = progress_line(store, 1, 30.0)
    assert line.startswith("round 1/3: north ") and "east step 15/30" in line
    assert "north step" not in line and "left" not in line


@pytest.mark.parametrize(
    "line",
    ['{"event": "train", "step": "9"}', '{"event": "train"}', "[1]", "[" * 30_000,
     '{"event": "train", "step": 1e999}', "7"],
)  # fmt: skip
def test_a_facility_may_have_written_anything_of_any_length(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = store_here()
    write_steps(store, "north", 5)
    file = next(Path("sites").rglob("metrics.jsonl"))
    file.write_text(f"{file.read_text()}{line}\n")
    assert "north step 5/30" in progress_line(store, 1, 30.0)
    file.write_text('{"event": "train", "step": 1' + 4000 * "0" + "}\n")
    assert "north step 30/30" in progress_line(store, 1, 30.0)
    with open(file, "r+b") as content:
        content.truncate(1 << 37)  # 128 GiB of nothing
    assert "north step 0/30" in progress_line(store, 1, 30.0)
    file.unlink()
    os.mkfifo(file)  # put there in the moment after somebody looked what it is
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    assert last_step(file) == 0
