"""The global models at a facility: each made from the one before and what came."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.campaign import round as round_
from atoll.campaign import site_models as site
from atoll.campaign.calls import never
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.store import checked_campaign
from atoll.errors import UserError

ROUNDS = 8


def arrive(folder: Path, before: int) -> None:
    came = folder / "incoming" / round_name(before)
    came.mkdir(parents=True)
    (came / "manifest.json").write_text(json.dumps({"round": before}))


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds whose models were made, in order; each needs the one before."""
    made: list[int] = []

    def apply_delta(folder: Path, before: int, came: Path, overrides: list[str]) -> None:
        base = folder / "bases" / round_name(before)
        is_whole = before == 0 or (came / "master").is_dir()
        assert is_whole or (folder / "bases" / round_name(before - 1)).is_dir()
        shutil.copytree(came, base)
        made.append(before)

    monkeypatch.setattr(site, "_apply_delta", apply_delta)
    return made


def test_each_round_needs_only_the_newest_delta(tmp_path: Path, applied: list[int]) -> None:
    for number in range(1, ROUNDS):
        assert site.make_bases(tmp_path, number, []) == number - 2
        arrive(tmp_path, number - 1)
        assert site.make_bases(tmp_path, number, []) == number - 1
    assert applied == list(range(ROUNDS - 1))
    kept = sorted(path.name for path in (tmp_path / "bases").iterdir())
    assert kept == [round_name(ROUNDS - 3), round_name(ROUNDS - 2)]


def test_what_an_rsync_that_was_killed_left_is_no_other_kind_of_file(
    tmp_path: Path, applied: list[int]
) -> None:
    """Else its facility would be out of the campaign for good, and the model is whole."""
    arrive(tmp_path, 0)
    master = tmp_path / "incoming" / round_name(0) / "master"
    master.mkdir()
    for name in (".model-00001-of-00002.safetensors.Ab12Cd", "..hidden.json.Ab12Cd"):
        (master / name).touch()
    (master.parent / ".manifest.json.xYz012").touch()
    assert site.make_bases(tmp_path, 1, []) == 0
    assert not list((tmp_path / "bases").rglob(".*"))
    for name in (".sitecustomize.py.Ab12Cd", ".bashrc"):
        arrive(tmp_path / name, 0)
        (tmp_path / name / "incoming" / round_name(0) / name).touch()
        with pytest.raises(UserError, match="is no part of a model"):
            site.make_bases(tmp_path / name, 1, [])


def test_a_model_that_is_sent_anew_is_whole_when_its_own_manifest_came(
    tmp_path: Path, applied: list[int]
) -> None:
    """The one of a delta, from before all models were lost here, says nothing of it."""
    for before in range(3):
        arrive(tmp_path, before)
    assert site.make_bases(tmp_path, 3, []) == 2
    shutil.rmtree(tmp_path / "bases")
    shutil.rmtree(tmp_path / "incoming" / round_name(0), ignore_errors=True)
    assert site.make_bases(tmp_path, 3, []) == -1
    (tmp_path / "incoming" / round_name(2) / "master").mkdir()  # and the line is cut
    assert site.make_bases(tmp_path, 3, []) == -1
    (tmp_path / "incoming" / round_name(2) / "manifest.json").touch()
    assert site.make_bases(tmp_path, 3, []) == 2


def test_the_model_that_the_own_weights_took_stays_where_rounds_overlap(
    tmp_path: Path, applied: list[int]
) -> None:
    """Round 8 begins with the model of round 5; the newest run before it is of round 6."""
    for number, took in ((5, 2), (6, 3)):
        here = tmp_path / "rounds" / round_name(number)
        asked = {"global_round": took, "fragments": 3, "merge_alpha": 0.0}
        Journal(here).append("asked", request=asked)
        Journal(here).append("submitted", run=str(tmp_path / "runs" / str(number)))
        (here / "update").mkdir()
        (here / "update" / "manifest.json").touch()
    for before in range(6):
        arrive(tmp_path, before)
        site.make_bases(tmp_path, before + 1, [], min(8, before + 3))
    kept = sorted(path.name for path in (tmp_path / "bases").iterdir())
    assert kept == [round_name(number) for number in (3, 4, 5)]


def test_a_facility_that_was_away_catches_up(tmp_path: Path, applied: list[int]) -> None:
    arrive(tmp_path, 0)
    assert site.make_bases(tmp_path, 1, []) == 0
    for before in range(1, 6):
        arrive(tmp_path, before)
    assert site.make_bases(tmp_path, 6, []) == 5
    assert applied == [0, 1, 2, 3, 4, 5]


def test_who_joins_gets_the_newest_model_whole(
    tmp_path: Path, applied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site.make_bases(tmp_path, 6, []) == -1
    (tmp_path / "incoming" / round_name(5) / "master").mkdir(parents=True)  # it is on its way
    assert site.make_bases(tmp_path, 6, []) == -1
    (tmp_path / "incoming" / round_name(5) / "manifest.json").touch()
    arrive(tmp_path, 6)
    assert site.make_bases(tmp_path, 7, []) == 6
    assert applied == [5, 6]
    sent: list[str] = []

    def send(*words: Any, over: Any = None) -> None:
        assert never in (over, words[-1]), "it ends when nobody waits any more"
        sent.append(words[3])

    monkeypatch.setattr(round_, "send", send)
    monkeypatch.setattr(round_, "_files", lambda *_: [])
    store: Any = SimpleNamespace(
        campaign=SimpleNamespace(attempts=3), model=lambda n: tmp_path / round_name(n) / "global"
    )
    facility: Any = SimpleNamespace(name="north", folder="f")
    for have in (-1, 3):
        for number in (4, 5):
            model = tmp_path / round_name(number) / "global"
            model.mkdir(parents=True, exist_ok=True)
            (model / "manifest.json").touch()
        round_._send_models(store, 5, facility, never, Journal(tmp_path), have)
    whole, later = "f/incoming/round-005", "f/incoming/round-004"
    assert sent[:3] == [f"{whole}/master", f"{whole}/export", whole]
    assert sent[3:] == [f"{later}/delta", later, f"{whole}/delta", whole]


def test_a_gap_is_asked_for_from_where_it_begins(tmp_path: Path, applied: list[int]) -> None:
    for before in (0, 1, 3):
        arrive(tmp_path, before)
    assert site.make_bases(tmp_path, 4, []) == 1


@pytest.mark.login_node
def test_a_model_that_never_gets_there_is_not_sent_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    store: Any = SimpleNamespace(asked_round=lambda *_: 5, journal=lambda _: None)
    monkeypatch.setattr(round_, "request", lambda *_: {"global_round": 4})
    facility: Any = SimpleNamespace(name="north", folder="sites/north")
    monkeypatch.setattr(round_, "_asked", lambda *_: {"state": "needs", "have": 3})
    monkeypatch.setattr(round_, "_send_models", lambda *words: sent.append(words[-1]))
    with pytest.raises(UserError, match="north has no global model newer than round 3"):
        round_.bring_models(store, 5, facility)
    assert sent == [3]


@pytest.mark.login_node
def test_a_model_that_is_lost_again_and_again_is_sent_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever deletes it after each answer would have it sent until the deadline."""
    for part in ("1/master", "1/export", "1/delta"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "1" / "manifest.json").touch()
    sent: list[str] = []
    monkeypatch.setattr(round_, "send", lambda *words, **_: sent.append(words[3]))
    journal, facility = Journal(tmp_path), SimpleNamespace(name="north", folder="north")
    campaign = SimpleNamespace(attempts=2)
    store: Any = SimpleNamespace(model=lambda n: tmp_path / str(n), campaign=campaign)

    def asked(*have: int) -> None:
        answers = [*({"state": "needs", "have": each} for each in have), {"state": "running"}]
        monkeypatch.setattr(round_, "_asked", lambda *_: answers.pop(0))
        round_.bring(store, 2, facility, {"global_round": 1}, journal)  # type: ignore[arg-type]

    for have in (-1, 0):  # the newest whole, and what came after it
        asked(have)
    with pytest.raises(UserError, match="north got the model of round 1 2 times, and has it no"):
        asked(-1)
    journal.append("reopened", waits=True)
    with pytest.raises(UserError, match="look into north/bases there, and its quota"):
        asked(0)
    journal.append("reopened", waits=False)  # by a person, who may have mended it
    asked(-1)
    assert sent.count("north/incoming/round-001") == 3


@pytest.mark.parametrize("name", ["export/evil.py", "master/evil.so", "delta/.sitecustomize"])
def test_what_no_model_folder_has_is_not_taken(
    tmp_path: Path, applied: list[int], name: str
) -> None:
    arrive(tmp_path, 0)
    came = tmp_path / "incoming" / round_name(0) / name
    for path in (came, came.with_name("tokenizer.model"), came.with_name("x.safetensors")):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(UserError, match=f"{came.name} came, which is no part of a model"):
        site.make_bases(tmp_path, 1, [])
    came.unlink()
    came.symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="no part of a model"):
        site.make_bases(tmp_path, 1, [])
    came.unlink()
    assert site.make_bases(tmp_path, 1, []) == 0 and applied == [0]


@pytest.mark.login_node
def test_of_an_export_only_what_a_model_needs_is_sent(tmp_path: Path) -> None:
    model, there = tmp_path / round_name(0) / "global", tmp_path / "north"
    for part in ("master", "export"):
        (model / part).mkdir(parents=True)
        for name in ("evil.py", "pytorch_model.bin", "config.json", "x.safetensors"):
            (model / part / name).write_text("x")
    (model / "manifest.json").touch()
    campaign = checked_campaign(
        {"name": "c", "sites": [{"name": "north", "folder": str(there)}], "start": []}
    )
    store: Any = SimpleNamespace(campaign=campaign, model=lambda _: model)
    journal = Journal(tmp_path)
    round_._send_models(store, 0, campaign.sites[0], lambda _: False, journal, -1)
    came = there / "incoming" / round_name(0)
    files = {str(path.relative_to(came)) for path in came.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "master/x.safetensors", "export/config.json"}
    assert journal.last("sent")["bytes"] == 2
    site.refuse_other_kinds(came)
