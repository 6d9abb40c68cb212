"""Fragments of facilities that are refused, late or away: nothing stalls, nothing counts twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from drawn_campaign import Draw, Facilities, Killed, begun, campaign_values, drawn, one_round
from torch import Tensor

from atoll.__main__ import main
from atoll.campaign import average, last_loss
from atoll.campaign import round as round_
from atoll.campaign.asked import request
from atoll.campaign.journal import Journal
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.own_weights import residual_round
from atoll.campaign.prove import prove_campaign
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.errors import UserError
from atoll.settings.exchange import read_manifest

HOLD = {"fragments": 2, "quorum": 2, "below_quorum": "hold"}
LATE = {"max_staleness": 1, "max_norm_ratio": 1e6, "min_cosine": -1.0}
Begin = Callable[..., tuple[CampaignStore, Facilities]]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    def campaign(facilities: Facilities, **changes: Any) -> tuple[CampaignStore, Facilities]:
        facilities.put_in_place(monkeypatch)
        long = {"rounds": 20, "codec": "fp32", "global_codec": "fp32"}
        return begun(tmp_path, campaign_values(tmp_path, **(long | changes))), facilities

    return campaign


def long_in(round_number: int) -> Draw:
    """South's update of this round is a thousand times too long."""

    def draw(facility: str, number: int, name: str, values: Tensor) -> Tensor:
        scale = 1000.0 if (facility, number) == ("south", round_number) else 1.0
        return scale * drawn(facility, number, name, values)

    return draw


def held(store: CampaignStore, last: int) -> list[int]:
    return [number for number in range(1, last + 1) if "held" in store.model_manifest(number)]


def proven(store: CampaignStore, last: int) -> int:
    """What `atoll verify` ends with, of a campaign that ends with this round."""
    values = store.campaign.model_dump(mode="json") | {"rounds": last}
    store = keep_settings(CampaignStore(checked_campaign(values), store.folder))
    prove_campaign(store, last)
    return main(["verify", str(store.export(last))])


@pytest.mark.parametrize("merge_alpha", [0.0, 0.9])
def test_one_long_update_holds_one_turn(begin: Begin, merge_alpha: float) -> None:
    """Of each fragment: who was refused does not send the same once more, ever longer."""

    rule = HOLD | {"merge_alpha": merge_alpha, "min_cosine": -1.0}
    store, facilities = begin(Facilities(long_in(round_number=3)), rule=rule)
    for number in range(1, 8):
        one_round(store, facilities, number)
    assert held(store, 7) == [3, 4]
    manifest = store.model_manifest(4)
    assert "more than 10 times" in manifest["rejected"]["south"]
    assert manifest["refused"] == {"0": {"south": 3}, "1": {"south": 4}}
    assert proven(store, 7) == 0


def test_a_held_round_of_an_older_atoll_is_as_stated(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It did not write whose updates were left out."""

    store, facilities = begin(Facilities(long_in(round_number=2)), rule=HOLD | {"fragments": 1})
    with monkeypatch.context() as patch:
        patch.setattr(average, "held_words", lambda _: {})
        for number in (1, 2, 3):
            one_round(store, facilities, number)
    for number in (1, 2, 3):
        path = store.model(number) / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["refused_rounds"]
        path.write_text(json.dumps(manifest))
    assert held(store, 3) == [2] and not store.without(2)
    assert proven(store, 3) == 0
    assert "not at hand  round 2: whose updates were left out of it" in capsys.readouterr().out


def test_whom_a_held_round_left_out_is_not_taken_from_it(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if an older Atoll had held it: the round before it is of this one."""

    store, facilities = begin(Facilities(long_in(round_number=2)), rule=HOLD | {"fragments": 1})
    for number in (1, 2):
        one_round(store, facilities, number)
    path = store.model(2) / "manifest.json"
    manifest = json.loads(path.read_text()) | {"rejected": {}, "refused": {}}
    for words in ({"refused_rounds": {}}, {}):
        manifest.pop("refused_rounds")
        manifest |= words
        path.write_text(json.dumps(manifest))
        assert proven(store, 2) == 2
        assert "the updates of round 2 make another model" in capsys.readouterr().err


def test_whoever_waited_long_for_another_goes_on_with_it(begin: Begin) -> None:
    """What one learned alone is by then far longer than what the other brings."""
    store, facilities = begin(Facilities(), rule=HOLD)
    for number in range(1, 20):
        scale = 30.0 if 3 <= number < 12 else 1.0

        def draw(*words: Any, scale: float = scale) -> Tensor:
            return scale * drawn(*words)

        facilities.draw = draw
        one_round(store, facilities, number, away=["south"] if 3 <= number < 12 else [])
    assert held(store, 11) == list(range(3, 12))
    assert len([n for n in held(store, 19) if n > 11]) <= 2, "each fragment at most once"


def test_a_damaged_update_is_no_wrong_proof(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is why the round was held, and nothing of it is in the model."""

    def damage(facility: str, number: int, update: Path) -> None:
        if (facility, number) == ("south", 2):
            path = next(update.glob("*.safetensors"))
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    store, facilities = begin(Facilities(made=damage), rule=HOLD | {"fragments": 1})
    for number in (1, 2, 3):
        one_round(store, facilities, number)
    assert held(store, 3) == [2] and list(store.without(2)) == ["south"]
    assert proven(store, 3) == 0
    assert "not at hand  round 2: south was left out" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["norms_before", "claims", "taken", "averaged_rounds"])
def test_what_a_manifest_leaves_out_is_told(
    begin: Begin, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Later rounds go by it: without it a long update would be taken."""
    store, facilities = begin(Facilities(), rule={"fragments": 2})
    for number in (1, 2):
        one_round(store, facilities, number)
    path = store.model(2) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest[name]
    path.write_text(json.dumps(manifest))
    one_round(store, facilities, 3)
    assert proven(store, 3) == 2
    assert f"{name} is" in capsys.readouterr().err


@pytest.mark.parametrize("overlap_rounds", [0, 1])
def test_a_turn_that_nobody_was_in_time_for_counts_once(begin: Begin, overlap_rounds: int) -> None:
    """North learns in its second round alone, which is late."""

    def once(facility: str, number: int, name: str, values: Tensor) -> Tensor:
        return torch.full_like(values, float((facility, number) == ("north", 2)))

    rule = LATE | {"fragments": 2, "overlap_rounds": overlap_rounds}
    store, facilities = begin(Facilities(once), rule=rule)
    one_round(store, facilities, 1, late=["south"])
    done = one_round(store, facilities, 2, late=["north"])
    assert done == (overlap_rounds == 0)
    if not done:  # south is asked for its own work of the round, whatever north does
        assert one_round(store, facilities, 2, late=["north"])
        assert store.model_manifest(2)["taken"]["1"] == {"south": 2}
    for number in range(3, 9):
        one_round(store, facilities, number)
    first, last = (made_up.read(store.model(n) / "master") for n in (0, 8))
    share = max(float((last[name] - first[name]).mean()) for name in first)
    assert 0.3 < share < 1.01


def test_late_work_that_is_let_go_is_gone_at_once(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at it, half of it is no damaged update; of who has left nobody is asked."""
    rule = LATE | {"fragments": 2, "overlap_rounds": 1}
    store, facilities = begin(Facilities(), rule=rule)
    one_round(store, facilities, 1, late=["south"])

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(average.shutil, "rmtree", killed)
        with pytest.raises(Killed):
            one_round(store, facilities, 2, late=["north"])
    assert "south" in [site.name for site in store.unsettled(2)]
    assert one_round(store, facilities, 2, late=["north"])
    assert list(store.model_manifest(2)["weights"]) == ["south"]
    assert not store.model_manifest(2)["unreadable"]


def test_a_kill_while_late_work_is_let_go_changes_no_data(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a model was read, and is not read again."""
    rule = LATE | {"fragments": 2, "overlap_rounds": 1}
    store, facilities = begin(Facilities(), rule=rule)
    [north, south] = store.campaign.sites
    one_round(store, facilities, 1, late=["south"])
    append = Journal.append

    def killed(self: Journal, event: str, **facts: Any) -> Any:
        done = append(self, event, **facts)
        if event == "afresh":
            raise Killed
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", killed)
        with pytest.raises(Killed):
            one_round(store, facilities, 2, late=["north"])
    one_round(store, facilities, 2)
    made = [store.model_manifest(n)["taken"] for n in (1, 2)]
    read = sum("south" in facts for taken in made for facts in taken.values())
    assert store.steps_before(4, south) - store.steps_before(4, north) == 10 * (read - 2)


def test_late_work_that_was_let_go_is_not_asked_for_after_a_kill(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = LATE | {"fragments": 2, "overlap_rounds": 1}
    store, facilities = begin(Facilities(), rule=rule)
    south = store.site("south")
    one_round(store, facilities, 1, late=["south"])
    append = Journal.append

    def killed(self: Journal, event: str, **facts: Any) -> Any:
        if event == "afresh":
            raise Killed
        return append(self, event, **facts)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", killed)
        with pytest.raises(Killed):
            one_round(store, facilities, 2, late=["north"])
    assert not store.update(2, south).is_dir() and store.asked_round(2, south) == 1
    for _ in range(2):
        average.finish_letting_go(store, 2)
    assert store.asked_round(2, south) == 2 and store.steps_before(4, south) == 0
    assert not list(store.round(2).glob("*/.update.let-go"))


@pytest.mark.parametrize("steps_by", ["fixed", "queue"])
def test_a_job_at_work_is_asked_for_the_same_when_late_work_is_let_go(
    begin: Begin, steps_by: str
) -> None:
    """Else its facility would refuse it, three times, and be left out of the round it is at."""
    rule = LATE | {"fragments": 2, "overlap_rounds": 1}
    store, facilities = begin(Facilities(), rule=rule, steps_by=steps_by)
    south = store.site("south")
    for number, steps in ((1, 12), (2, 11), (3, 14)):
        store.journal(number).append("steps", steps={"south": steps, "north": 10})
    one_round(store, facilities, 1, late=["south"])
    facilities.late = ("north",)
    for site in store.campaign.sites:
        round_.go_on(store, 2, site)
    facilities.late = ("north", "south")
    round_.go_on(store, 3, south)
    before = request(store, 3, south)
    store.leave_out_late(2)
    assert not average.average(store, 2)
    assert request(store, 3, south) == before
    assert one_round(store, facilities, 2, late=["north"])
    assert store.model_manifest(2)["taken"]["1"] == {"south": 2}
    assert request(store, 3, south) == before and store.asked_round(3, south) == 3
    own = 10 if steps_by == "fixed" else 11
    assert store.steps_before(4, south) == own, "what was let go is read again"


def test_late_work_that_was_let_go_of_who_has_left_is_no_wrong_proof(begin: Begin) -> None:
    rule = LATE | {"fragments": 2, "overlap_rounds": 1}
    store, facilities = begin(Facilities(), rule=rule)
    one_round(store, facilities, 1, late=["south"])
    assert not one_round(store, facilities, 2, late=["north"])
    [north, _] = store.campaign.sites
    alone = store.campaign.model_copy(update={"sites": [north]})
    store = CampaignStore(alone, store.folder)
    assert one_round(store, facilities, 2)
    assert list(store.model_manifest(2)["weights"]) == ["north"]
    assert proven(store, 2) == 0


def test_late_work_of_who_has_left_stops_where_nobody_else_is(begin: Begin) -> None:
    rule = LATE | {"fragments": 2, "overlap_rounds": 1}
    store, facilities = begin(Facilities(), rule=rule)
    one_round(store, facilities, 1, late=["south"])
    facilities.late = ("north",)
    for site in (store.site("north"), store.site("south")):
        round_.go_on(store, 2, site)
    [north, _] = store.campaign.sites
    alone = store.campaign.model_copy(update={"sites": [north]})
    store = CampaignStore(alone, store.folder)
    store.leave_out_late(2)
    with pytest.raises(UserError, match="nobody's update is in time, and rounds overlap"):
        average.average(store, 2)


def test_late_work_that_a_kill_cut_off_is_taken(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nonce was kept, and the update never came."""
    store, facilities = begin(Facilities(), rule=LATE)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == ".update.partial" and self.parent.name == "south":
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            one_round(store, facilities, 1)
    one_round(store, facilities, 1, away=["south"])
    assert list(store.left_out(1)) == ["south"]
    one_round(store, facilities, 2)
    assert set(store.model_manifest(2)["weights"]) == {"north", "south"}
    assert store.model_manifest(2)["taken"]["0"] == {"north": 2, "south": 1}
    nonces = [read_manifest(path).nonce for n in (1, 2) for path in store.updates(n)]
    assert all(store.is_known(nonce, 9, store.site("north")) for nonce in nonces)


def test_asking_for_the_last_loss_changes_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A campaign that goes on behind it has the models of one that was not asked."""
    rule = LATE | {"fragments": 3, "overlap_rounds": 1}
    digests = []
    for asks in (False, True):
        folder, facilities = tmp_path / str(asks), Facilities()
        facilities.put_in_place(monkeypatch)
        values = campaign_values(folder, ("north", "south", "west"), rule=rule, rounds=8)
        store = begun(folder, values)
        for number in range(1, 9):
            one_round(store, facilities, number, late=["south"] if number == 2 else [])
            if number == 4 and asks:
                facilities.late = ()
                last_loss.measure_last(store, 4)
                assert store.global_loss(4) == 2.0
        digests.append([store.model_manifest(number)["digest"] for number in range(9)])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("manifest", "rounds", "expected"),
    [
        ({"taken": {"0": {"south": 7}}}, [6, 7], 7),
        ({"taken": {"0": {"south": 7}}}, [6], None),  # it is in the update of round 7
        ({"taken": {"0": {"south": 5}}}, [5, 6], 5),  # that of round 6 came to nothing
        ({"taken": {"0": {"south": 5}}}, [4, 8], 8),  # under way still
        ({"taken": {}}, [6], None),
        ({}, [6], 6),  # of an older Atoll
    ],
)
def test_a_residual_that_is_gone_is_not_replaced_by_an_older_one(
    tmp_path: Path, manifest: dict[str, Any], rounds: list[int], expected: int | None
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"rule": {}}))
    asked = {"fragment": 0, "facility": "south", "global_round": 7}
    assert residual_round(tmp_path, asked, rounds) == expected


def test_a_residual_that_is_gone_is_not_replaced_where_rounds_overlap(tmp_path: Path) -> None:
    rule = {"overlap_rounds": 1, "max_staleness": 2}
    content = {"taken": {"0": {"south": 7}}, "rule": rule}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    asked = {"fragment": 0, "facility": "south", "global_round": 7}
    assert residual_round(tmp_path, asked, [6]) is None
    assert residual_round(tmp_path, asked, [6, 8]) == 8
