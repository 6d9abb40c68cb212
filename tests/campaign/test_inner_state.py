"""The moments a facility keeps: of which round, and that a round done again begins with its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from atoll import run_dir
from atoll.campaign.asked import training_words
from atoll.campaign.inner_state import inner_state_words, prune_states
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.config.compose import compose, path_word
from atoll.errors import UserError

KEPT = {"inner_state": "kept"}
LINES = ["facility=laptop", "name=x"]
VALUES: dict[str, Any] = {
    "name": "c",
    "rounds": 4,
    "steps": 10,
    "batch_samples": 8,
    "sites": [{"name": "reef", "folder": "/reef"}],
    "start": [],
}


def trained(folder: Path, number: int, steps: int = 3, whole: bool = True) -> Path:
    """A round whose run has ended, and whose update is made where it is whole; the checkpoint."""
    run, here = folder / "runs" / round_name(number), folder / "rounds" / round_name(number)
    Journal(here).append("submitted", run=str(run))
    for step in (1, steps):
        run_dir.checkpoint(run, step).mkdir(parents=True)
        (run_dir.checkpoint(run, step) / "manifest.json").write_text("{}")
    if whole:
        (here / "update").mkdir()
        (here / "update" / "manifest.json").touch()
    return run_dir.checkpoint(run, steps)


def words(folder: Path, number: int, *lines: str, **request: str) -> list[str]:
    here = folder / "rounds" / round_name(number)
    return inner_state_words(folder, here, KEPT | request, [*LINES, *lines])


def test_a_round_begins_with_the_moments_of_the_newest_before_it(tmp_path: Path) -> None:
    assert words(tmp_path, 1) == []
    first = trained(tmp_path, 1)
    trained(tmp_path, 2, whole=False)  # it came to nothing
    trained(tmp_path, 5)
    assert words(tmp_path, 3) == [path_word("checkpoint.optimizer_load_path", first)]


def test_a_round_done_again_begins_where_it_did(tmp_path: Path) -> None:
    assert words(tmp_path, 1) == []
    first = trained(tmp_path, 2)
    before = words(tmp_path, 4)
    trained(tmp_path, 3)  # work that came late
    assert words(tmp_path, 4) == before == [path_word("checkpoint.optimizer_load_path", first)]
    assert words(tmp_path, 1) == []


def test_moments_begin_anew_where_that_is_chosen_or_adapters_are_drawn_anew(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    assert words(tmp_path, 2, inner_state="reset") == []
    assert words(tmp_path, 3, "model=opt_tiny", "+model.lora.rank=4") == []


def test_moments_in_8_bits_begin_anew_with_other_ranks(tmp_path: Path) -> None:
    """Else no run of the facility would begin again until its nodes are as before."""
    state = trained(tmp_path, 1)
    progress = {"step_counts": {"weight": 3}, "world_size": 2}
    (state / "manifest.json").write_text(json.dumps({"progress": progress}))
    kept = [path_word("checkpoint.optimizer_load_path", state)]
    assert words(tmp_path, 2, "ranks_per_node=2") == kept
    assert words(tmp_path, 2, "ranks_per_node=4") == []
    (state / "manifest.json").write_text(json.dumps({"progress": progress | {"step_counts": {}}}))
    assert words(tmp_path, 2, "ranks_per_node=4") == kept


@pytest.mark.parametrize(
    "other", ["optimizer=muon", "optimizer.groups=[{names: norm, frozen: true}]"]
)
def test_moments_begin_anew_with_another_optimizer(tmp_path: Path, other: str) -> None:
    """A facility that left, and returned with it: each of its jobs would end at the old ones."""
    state = trained(tmp_path, 1)
    settings = compose([*LINES, "optimizer.learning_rate=1e-2"]).as_yaml()
    run_dir.write_whole(run_dir.settings_file(state.parents[1]), settings)
    kept = [path_word("checkpoint.optimizer_load_path", state)]
    assert words(tmp_path, 2) == kept, "its rate is no other optimizer"
    assert words(tmp_path, 2, other) == []


def test_checkpoints_stay_of_the_newest_rounds_and_of_what_a_round_began_with(
    tmp_path: Path,
) -> None:
    first = trained(tmp_path, 1)
    states = {number: trained(tmp_path, number) for number in (2, 3, 5)}
    under_way = trained(tmp_path, 4, whole=False)
    prune_states(tmp_path, 5, 2)
    assert not first.exists() and states[2].is_dir() and states[3].is_dir() and under_way.is_dir()
    first = trained(tmp_path / "again", 1)
    words(tmp_path / "again", 6)  # it began with the first; others came late
    states = {number: trained(tmp_path / "again", number) for number in (2, 3, 5)}
    prune_states(tmp_path / "again", 6, 1)
    assert [path.is_dir() for path in states.values()] == [False, False, True]
    assert first.is_dir(), "done again, the round begins with it"


def begun(folder: Path) -> None:
    """A first model, with which settings stay."""
    store = CampaignStore(checked_campaign(VALUES), folder)
    run_dir.write_whole(store.model(0) / "manifest.json", "{}")


def test_one_schedule_spans_the_campaign_however_long_it_becomes(tmp_path: Path) -> None:
    begun(tmp_path)
    for rounds in (4, 9):
        campaign = checked_campaign(VALUES | {"rounds": rounds})
        store = keep_settings(CampaignStore(campaign, tmp_path))
        assert store.campaign == load_store(tmp_path).campaign
        asked = training_words(store.campaign, 3, store.campaign.sites[0], 3, 6)
        assert {"training.consumed_steps=20", "training.schedule_steps=40"} < set(asked)
    with pytest.raises(UserError, match="begun with schedule_rounds=4, now it is 9"):
        keep_settings(CampaignStore(checked_campaign(VALUES | {"schedule_rounds": 9}), tmp_path))


def test_a_campaign_that_was_begun_without_it_has_the_schedule_of_its_rounds(
    tmp_path: Path,
) -> None:
    begun(tmp_path)
    store = keep_settings(CampaignStore(checked_campaign(VALUES), tmp_path))
    file = tmp_path / "campaign.json"
    content = json.loads(file.read_text())
    del content["schedule_rounds"]
    file.write_text(json.dumps(content))
    later = CampaignStore(checked_campaign(VALUES | {"rounds": 7}), tmp_path)
    assert keep_settings(later).campaign.schedule_rounds == store.campaign.schedule_rounds == 4
