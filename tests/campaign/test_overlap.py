"""Rounds of fragments that overlap: who goes on before the others, and from which weights."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from test_federate import MODEL, TEXT, TINY, finished, manifest, settings, start
from test_hostile_facilities import BASE, READY, made, say, saying, store_of

from atoll.__main__ import main
from atoll.campaign import own_weights
from atoll.campaign.asked import request, training_words
from atoll.campaign.asking import overlapped
from atoll.campaign.coordinator import _reached_target, run
from atoll.campaign.dry_run import dry_run
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.lasting_settings import keep_settings, refuse_what_loses
from atoll.campaign.store import CampaignStore, checked_campaign, load_store
from atoll.errors import UserError

RULE = {"fragments": 2, "overlap_rounds": 1, "merge_alpha": 0.5, "max_norm_ratio": 100}
RULE |= {"min_cosine": -1.0}
LAYERS = [*MODEL, "model.config.num_hidden_layers=2"]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.campaign.asked.sequence_tokens", lambda *_: 16)


@pytest.mark.login_node
def test_who_is_done_is_asked_for_the_next_round(tmp_path: Path) -> None:
    """The other one is ready only then: without overlap the round would end without it."""
    for name in ("north", "south"):
        made(tmp_path, name)
    asked = f"echo $3 >> {tmp_path}/asked\n"
    after = f'grep -q 2 {tmp_path}/asked || exec echo \'{{"state": "running"}}\'\n'
    store = store_of(tmp_path, rule=RULE, deadline_minutes=0.5, rounds=2)
    store = saying(store, tmp_path, north=asked + say(READY), south=after + say(READY))
    with overlapped(store) as collect:
        collect(store, 1)
    assert len(store.updates(1)) == 2 and not store.left_out(1)
    assert "2" in (tmp_path / "asked").read_text().split()


def test_a_round_begins_with_the_model_of_two_rounds_before(tmp_path: Path) -> None:
    store = store_of(tmp_path, rule=RULE, rounds=4)
    for number in (1, 2):
        shutil.copytree(store.model(0), store.model(number))
        (store.model(number) / "manifest.json").write_text(json.dumps({"digest": f"{number}" * 64}))
    [north, _] = store.campaign.sites
    words = [request(store, number, north) for number in (1, 2, 3, 4)]
    assert [each["base"] for each in words] == [BASE, BASE, "1" * 64, "2" * 64]
    assert [each["global_round"] for each in words] == [0, 0, 1, 2]
    assert [each["fragment"] for each in words] == [0, 1, 0, 1]
    assert training_words(store.campaign, 3, north, 10, 20)


def test_own_weights_go_on_and_a_round_done_again_begins_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[list[str]] = []
    monkeypatch.setattr(own_weights, "run_atoll", lambda argv, _: words.append(argv))
    monkeypatch.setattr(own_weights, "container_side", lambda *_: [])
    asked = {"fragments": 4, "fragment_pattern": "strided", "merge_alpha": 0.5, "frozen": None}
    asked |= {"overrides": [], "facility": "north"}
    model = tmp_path / "base" / "manifest.json"
    model.parent.mkdir()
    rounds = {"0": 5, "1": 2, "2": 3, "3": 4}
    model.write_text(json.dumps({"averaged_rounds": rounds, "changed_rounds": rounds}))

    def begins(number: int, newest: int, **changes: Any) -> Path:
        here = tmp_path / "rounds" / round_name(number)
        own = asked | {"global_round": newest} | changes
        Journal(here).append("asked", request=own)
        return own_weights.begins_with(tmp_path, here, own, tmp_path / "base")

    def train(number: int) -> None:
        here = tmp_path / "rounds" / round_name(number)
        Journal(here).append("asked", request=asked | {"global_round": number - 2})
        Journal(here).append("submitted", run=str(tmp_path / "runs" / str(number)))
        (here / "update").mkdir()
        (here / "update" / "manifest.json").touch()

    assert begins(3, 1) == tmp_path / "base" / "export", "who joins begins with the whole model"
    train(3)
    assert begins(7, 5) == tmp_path / "starts" / round_name(7) / "export"
    own = str(tmp_path / "runs" / "3" / "export")
    [taken] = words
    assert taken[:4] == [
        "merge-global",
        str(tmp_path / "base"),
        own,
        str(tmp_path / "starts" / round_name(7)),
    ]
    merged = taken[taken.index("--merge") + 1 : taken.index("--add")]
    assert merged == ["0", "1", "2", "3"], "rounds 2 to 5 averaged each of them"
    train(5)  # work that came late
    begins(7, 5)
    assert words[1] == taken
    begins(8, 6)
    assert words[2][2] == str(tmp_path / "runs" / "5" / "export")
    assert [each[each.index("--alpha") + 1] for each in words] == ["0.5"] * 3
    begins(10, 8)
    assert words[3][-1] == "0.0", "away for longer than four fragments take"
    assert begins(9, 8, fragments=1, merge_alpha=0.0) == tmp_path / "base" / "export"


@pytest.mark.parametrize(
    ("about", "before", "has_before", "found"),
    [
        # fragment -> the last turn that was averaged, the last round that changed it
        ({"0": (5, 5), "1": (4, 4)}, 4, True, ([0], [])),  # the usual
        ({"0": (5, 5), "1": (4, 5)}, 4, True, ([0], [1])),  # and late work to the other
        ({"0": (5, 5), "1": (4, 5)}, 4, False, ([0, 1], [])),
        ({"0": (3, 3), "1": (4, 4)}, 4, True, ([], [])),  # held
        ({"0": (3, 3), "1": (4, 5)}, 4, True, ([], [1])),  # late work alone
        ({"0": (1, 4), "1": (2, 2)}, 2, True, ([], [0])),  # of a turn that was held
        ({"0": (5, 5), "1": (4, 4)}, 2, True, ([0, 1], [])),
        (None, 4, True, ([0], [])),  # of an older Atoll
    ],
)
def test_what_changed_is_taken_and_late_changes_are_added(
    tmp_path: Path,
    about: dict[str, tuple[int, int]] | None,
    before: int,
    has_before: bool,
    found: tuple[list[int], list[int]],
) -> None:
    manifest: dict[str, Any] = {}
    if about is not None:
        averaged, changed = ({n: both[k] for n, both in about.items()} for k in (0, 1))
        manifest = {"averaged_rounds": averaged, "changed_rounds": changed}
    asked = {"fragments": 2, "global_round": 5, "facility": "north"}
    record = {"global_round": before, "round": before + 1}

    def fragments(**more: Any) -> tuple[list[int], list[int]]:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | more))
        return own_weights.changed_fragments(tmp_path, record, asked, has_before)

    assert fragments() == found
    added = {str(n): {"north": before + 1, "south": 1} for n in found[1]}
    assert fragments(taken=added) == (sorted([*found[0], *found[1]]), []), (
        "it was its own late work"
    )


@pytest.mark.parametrize(
    ("taken", "refused", "max_staleness", "overlap_rounds", "expected"),
    [
        (3, 0, 0, 1, 3),
        (1, 0, 0, 1, 1),  # round 3 was held, or its update was refused
        (0, 0, 0, 1, None),
        (1, 0, 2, 1, 3),  # it may come to something yet
        (1, 0, 2, 0, 1),  # it may not: its facility is asked for another round
        (1, 0, 1, 1, 1),
        (1, 3, 2, 1, 1),
    ],
)
def test_the_residual_of_the_last_update_that_was_taken_is_added(
    tmp_path: Path,
    taken: int,
    refused: int,
    max_staleness: int,
    overlap_rounds: int,
    expected: int | None,
) -> None:
    about = {"taken": {"0": {"north": taken}}, "refused": {"0": {"north": refused}}}
    about |= {"rule": {"max_staleness": max_staleness, "overlap_rounds": overlap_rounds}}
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    asked = {"fragment": 0, "global_round": 4, "facility": "north"}
    assert own_weights.residual_round(tmp_path, asked, [1, 3]) == expected
    (tmp_path / "manifest.json").write_text("{}")
    assert own_weights.residual_round(tmp_path, asked, [1, 3]) == 3, "of an older Atoll"


@pytest.mark.parametrize(
    ("taken", "previous", "needless"),
    [(5, 5, [1, 2, 3]), (4, 5, [1, 2]), (1, 5, []), (0, 5, []), (0, None, [])],
)
def test_residuals_that_no_update_is_added_to_are_removed(
    tmp_path: Path, taken: int, previous: int | None, needless: list[int]
) -> None:
    """Each is as large as the model in fp32."""
    about = {"taken": {"0": {"north": taken}}}
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    asked = {"fragment": 0, "global_round": 6, "facility": "north"}
    found = own_weights.needless_residuals(tmp_path, asked, [1, 2, 3, 4, 5], previous)
    assert found == needless


def test_late_work_that_was_refused_is_left_behind(tmp_path: Path) -> None:
    """Of round 3, refused in round 4: whoever took the third model knows of it in the fourth."""
    about = {"refused": {"2": {"north": 3}}, "refused_in": {"2": {"north": 4}}}
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    asked = {"facility": "north"}
    for took, whole in ((2, [2]), (3, [2]), (4, [])):
        record = {"global_round": took}
        assert own_weights.refused_fragments(tmp_path, record, asked) == whole
    (tmp_path / "manifest.json").write_text(json.dumps({"refused": about["refused"]}))
    assert own_weights.refused_fragments(tmp_path, {"global_round": 2}, asked) == [2]
    assert own_weights.refused_fragments(tmp_path, {"global_round": 3}, asked) == []


def test_a_target_and_weights_of_their_own_are_refused_together(tmp_path: Path) -> None:
    def store_of(rule: dict[str, Any], target_loss: float | None) -> CampaignStore:
        values = settings(tmp_path, rule=rule) | {"target_loss": target_loss}
        return CampaignStore(checked_campaign(values), tmp_path)

    for has_begun in (False, True):
        with pytest.raises(UserError, match="target_loss=2 with"):
            refuse_what_loses(store_of(RULE, 2.0))
        keep_settings(store_of(RULE, None))
        assert has_begun == store_of(RULE, None).has_model(0)
        (tmp_path / "round-000" / "global").mkdir(parents=True, exist_ok=True)
        (tmp_path / "round-000" / "global" / "manifest.json").write_text("{}")
    keep_settings(store_of(RULE, 2.0))
    refuse_what_loses(store_of(RULE, 2.0))  # as an older Atoll took it
    for rule, is_reached in (({}, True), (RULE, False)):
        store = store_of(rule, 2.0)
        for site in store.campaign.sites:
            store.update(1, site).mkdir(parents=True, exist_ok=True)
            store.record_answer(1, site, {"state": "ready", "losses": [1.0]})
        assert _reached_target(store, 1) == is_reached


def test_a_share_of_their_own_and_cosines_are_refused_together(tmp_path: Path) -> None:
    """Honest facilities point away from each other by what they keep."""
    store = CampaignStore(
        checked_campaign(settings(tmp_path, rule=RULE | {"min_cosine": -0.5})), tmp_path
    )
    with pytest.raises(UserError, match=r"merge_alpha=0\.5 with rule\.min_cosine=-0\.5"):
        refuse_what_loses(store)
    refuse_what_loses(CampaignStore(checked_campaign(settings(tmp_path, rule=RULE)), tmp_path))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rule": {"overlap_rounds": 1}}, "overlap_rounds=1 with fragments=1"),
        (
            {"rule": RULE | {"max_staleness": 1, "below_quorum": "hold"}},
            "max_staleness=1 and below_quorum=hold",
        ),
        ({"rule": RULE, "engine": "streamflow"}, "engine=streamflow with rule.overlap_rounds=1"),
    ],
)
def test_what_cannot_overlap_is_refused(
    tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    with pytest.raises(UserError, match=found):
        checked_campaign(settings(tmp_path, **changes))


def test_more_fragments_than_layers_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    few = [*TINY, *MODEL, "data.files=[json/*]"]
    campaign = checked_campaign(settings(tmp_path, start=few, rule=RULE))
    store = CampaignStore(campaign, tmp_path / "campaigns" / "c")
    for do in (dry_run, run):
        with pytest.raises(UserError, match=r"rule.fragments=2 of a model of 1 layers"):
            do(store)
    assert not store.model(0).exists() and not list(tmp_path.glob("sites"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole campaign of three rounds of two fragments, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("overlap")
    finished(folder, **three_rounds(), last_loss=True)
    return folder


def three_rounds() -> dict[str, Any]:
    start = [*TINY, *LAYERS, "data.files=[json/*,email/*]"]
    return {"start": start, "rule": RULE, "rounds": 3, "schedule_rounds": 3}


def size_of(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.full
@pytest.mark.login_node
def test_a_campaign_of_fragments_is_verified_and_sends_one_a_round(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = load_store(begun / "campaigns" / "c")
    whole = sum(map(size_of, (store.model(0) / "master").iterdir()))
    for number in (1, 2, 3):
        received = store.journal(number).records("received")
        assert {each["facility"] for each in received} == set(TEXT)
        weights = [sum(map(size_of, each.glob("*.safetensors"))) for each in store.updates(number)]
        assert len(weights) == len(TEXT) and max(weights) < 0.2 * whole  # int8 is a quarter
        assert set(manifest(begun, number)["weights"]) == set(TEXT)
    ended = store.journal(1).last("averaged")["time"]
    there = [Journal(begun / "sites" / name / "rounds" / round_name(2)) for name in TEXT]
    assert min(each.records("asked")[0]["time"] for each in there) < ended, "before the other sent"
    starts = {path.name for path in begun.glob("sites/*/starts/*")}
    assert starts == {round_name(2), round_name(3)}
    assert store.global_loss(1) is None, "nobody began round 2 with it"
    assert store.global_loss(3) is not None
    assert main(["verify", str(store.export(3))]) == 0
    assert "round 3: aggregated again, bit for bit (2)" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.login_node
@pytest.mark.parametrize("moment", [(1, "received"), (2, "received"), (3, "answered")])
def test_killed_while_rounds_overlap_it_goes_on_to_the_same_model(
    begun: Path, tmp_path: Path, moment: tuple[int, str]
) -> None:
    shutil.copytree(begun / "campaigns/c/round-000", tmp_path / "campaigns/c/round-000")
    for name in TEXT:
        for part in ("prepared", "tokenizer"):
            shutil.copytree(begun / "sites" / name / part, tmp_path / "sites" / name / part)
    process = start(tmp_path, **three_rounds())
    journal = Journal(tmp_path / "campaigns" / "c" / round_name(moment[0]))
    while not journal.records(moment[1]):
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished(tmp_path, **three_rounds())
    for number in (1, 2, 3):
        assert manifest(tmp_path, number)["digest"] == manifest(begun, number)["digest"]
    assert len(list(tmp_path.glob("sites/*/runs/*"))) == 6, "a run for each facility and round"
