"""Scripted facilities that lie, hang, flood and claim: each is its own failure, nobody else's."""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll import run_dir
from atoll.campaign import average as averaging
from atoll.campaign import coordinator, site, transfer
from atoll.campaign import round as round_
from atoll.campaign.allow import refuse_outside, refuse_settings
from atoll.campaign.asked import check_update, request
from atoll.campaign.asking import collect_here
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.lasting_settings import keep_settings, refuse_what_loses
from atoll.campaign.round import go_on
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.campaign.transfer import Unreachable
from atoll.commands import Finished
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.one_writer import one_writer
from atoll.settings.exchange import read_answer
from atoll.settings.federation import Site

BASE = hashlib.sha256(b"the model").hexdigest()
READY = '{"state": "ready", "losses": [3.0, 2.0]}'


def store_of(folder: Path, **changes: Any) -> CampaignStore:
    """A campaign whose first model is there, of two facilities that no program stands for yet."""
    sites = [{"name": name, "folder": str(folder / name)} for name in ("north", "south")]
    values = {"name": "c", "sites": sites, "start": [], "attempts": 2, "poll_seconds": 0.05}
    values |= {"steps": 10, "batch_samples": 4, "deadline_minutes": 5, "grace_minutes": 0.02}
    store = CampaignStore(checked_campaign(values | changes), folder / "campaigns" / "c")
    master = store.model(0) / "master"
    master.mkdir(parents=True)
    (master / "model.safetensors").write_bytes(bytes(1000))
    (store.model(0) / "manifest.json").write_text(json.dumps({"digest": BASE, "weights": {}}))
    return store


def program(folder: Path, name: str, text: str) -> list[str]:
    path = folder / f"{name}.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return [str(path)]


def saying(store: CampaignStore, folder: Path, **texts: str) -> CampaignStore:
    """The campaign with a program for each facility."""
    sites = [
        each.model_copy(update={"command": program(folder, each.name, texts[each.name])})
        for each in store.campaign.sites
        if each.name in texts
    ]
    return CampaignStore(store.campaign.model_copy(update={"sites": sites}), store.folder)


def say(text: str) -> str:
    return f"cat <<'END'\n{text}\nEND"


def made(folder: Path, facility: str, **claims: Any) -> Path:
    """An update at a facility that the coordinator has no reason to refuse, but for its claims."""
    update = folder / facility / "rounds" / round_name(1) / "update"
    update.mkdir(parents=True)
    content = facility.encode() * 20
    (update / "delta-model.safetensors").write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {
        "format_version": 1, "campaign": "c", "round": 1, "facility": facility, "base": BASE,
        "tokens": 10 * 4 * 16, "steps": 10, "loss": 2.0, "image": "none", "configuration": "x",
        "data": "y", "encoding": "int8", "nonce": hashlib.md5(facility.encode()).hexdigest(),
        "files": {"delta-model.safetensors": facts},
    }  # fmt: skip
    (update / "manifest.json").write_text(json.dumps(manifest | claims))
    return update


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.campaign.asked.sequence_tokens", lambda *_: 16)


@pytest.mark.parametrize(
    "text",
    [
        f"Welcome to the north!\n{READY}", "[]", "{}", "", "null", "3", '"ready"', "[" * 99_999,
        '{"state": 5}', '{"state": "done"}', '{"state": "needs"}', '{"state": "refused", "why": 3}',
        '{"state": "needs", "have": "x"}', '{"state": "needs", "have": 9}',
        '{"state": "needs", "have": -7}', '{"state": "ready", "losses": ["a"]}',
        '{"state": "ready", "losses": 5}', '{"state": "ready", "losses": [-1e9]}',
        '{"state": "ready", "losses": [NaN]}', '{"state": "ready", "started": "now"}',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_an_answer_that_is_none_is_a_failure_of_who_gave_it(tmp_path: Path, text: str) -> None:
    store = saying(store_of(tmp_path), tmp_path, north=say(text))
    [north] = store.campaign.sites
    go_on(store, 1, north)
    state = store.state(1, north)
    assert state.failures == 1 and state.text.startswith("wrong: "), state
    go_on(store, 1, north)
    assert "north" in store.left_out(1)


def test_columns_that_no_goodput_has_are_not_kept() -> None:
    """Others in each answer, with its update or without, would fill the journal."""
    said = {"compute": 3.0, "idle": 0.0, **{f"{n}{'x' * 400}": 1.0 for n in range(18)}}
    answer = read_answer(json.dumps({"state": "ready", "node_seconds": said}), "north")
    assert answer["node_seconds"] == {"compute": 3.0, "idle": 0.0}


@pytest.mark.login_node
def test_nothing_is_lent_to_a_facility(tmp_path: Path) -> None:
    """As ssh itself reads a person's own settings for login nodes beside ours."""
    (tmp_path / "config").write_text(
        "Host *\n ForwardAgent yes\n ForwardX11 yes\n RemoteForward 7001 localhost:22\n"
    )
    argv = [*transfer.SSH, "-F", str(tmp_path / "config"), "-G", "login"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"forwardagent no", "forwardx11 no", "clearallforwardings yes"} <= {*shown}


@pytest.mark.login_node
def test_who_gives_no_sign_of_life_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no end: a step of a workflow would keep the others waiting."""
    monkeypatch.setattr(round_, "SILENT_SECONDS", 0.3)
    store = saying(store_of(tmp_path), tmp_path, north="exec sleep 60")
    began = time.monotonic()
    with pytest.raises(Unreachable, match="no answer in the time that it has"):
        round_.bring_models(store, 1, store.campaign.sites[0], "--receive")
    assert time.monotonic() - began < 20


def test_what_floods_is_cut_off(tmp_path: Path) -> None:
    store = saying(store_of(tmp_path), tmp_path, north='yes \'{"state": "ready"}\'')
    go_on(store, 1, store.campaign.sites[0])
    assert "more than" in store.state(1, store.campaign.sites[0]).text
    assert store.state(1, store.campaign.sites[0]).failures == 1


@pytest.mark.login_node
def test_a_command_that_ends_as_timeout_does_is_a_failure_and_no_dead_line(tmp_path: Path) -> None:
    store = saying(store_of(tmp_path), tmp_path, north="echo too slow >&2; exit 124")
    go_on(store, 1, store.campaign.sites[0])
    assert store.state(1, store.campaign.sites[0]).failures == 1
    assert "too slow" in store.state(1, store.campaign.sites[0]).text


@pytest.mark.login_node
def test_the_deadline_holds_while_a_facility_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it hang for the others; what it started holds the pipe when it is gone."""
    monkeypatch.setattr(round_, "QUIET_SECONDS", 1.0)
    made(tmp_path, "south")
    store = store_of(tmp_path, deadline_minutes=0.03, grace_minutes=10)
    store = saying(store, tmp_path, north="sleep 60 & sleep 60", south=say(READY))
    began = time.monotonic()
    collect_here(store, 1)
    assert time.monotonic() - began < 15
    assert [path.parent.name for path in store.updates(1)] == ["south"]
    assert "no update after 0.03 minutes" in store.left_out(1)["north"]


@pytest.mark.login_node
def test_who_is_at_work_at_the_deadline_has_the_grace_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_, "QUIET_SECONDS", 1.5)
    alive = "for n in 1 2 3 4 5 6 7; do sleep 0.5; echo >&2; done\n"
    for name in ("north", "south"):
        made(tmp_path, name)
    store = store_of(tmp_path, deadline_minutes=0.01, grace_minutes=10)
    store = saying(store, tmp_path, north=alive + say(READY), south=say(READY))
    collect_here(store, 1)
    assert len(store.updates(1)) == 2, "it gave signs of life"
    store = store_of(tmp_path / "b", deadline_minutes=0.01, grace_minutes=0.02)
    store = saying(store, tmp_path / "b", north="while sleep 0.3; do echo >&2; done")
    began = time.monotonic()
    collect_here(store, 1)
    assert time.monotonic() - began < 15 and "north" in store.left_out(1)


@pytest.mark.login_node
def test_who_works_without_an_answer_is_asked_for_the_same_later(tmp_path: Path) -> None:
    """One without a scheduler trains while it is asked: another run would begin beside it."""
    store = store_of(tmp_path, deadline_minutes=0.01, rule={"max_staleness": 1})
    alive = "while sleep 0.3; do echo >&2; done"
    store = saying(store, tmp_path, north=alive, south="exec sleep 60")
    collect_here(store, 1)
    asked = [store.asked_round(2, site) for site in store.campaign.sites]
    assert asked == [1, 2], "south gave no sign of life"


def test_a_model_that_is_on_its_way_at_the_deadline_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next round's is sent from its first byte, and none ever comes."""
    store = store_of(tmp_path, rule={"max_staleness": 1})

    def cut(*_: object, **__: object) -> None:
        raise transfer.Unreachable("north: rsync: no answer", "later")

    monkeypatch.setattr(round_, "_asked", lambda *_: {"state": "needs", "have": -1})
    monkeypatch.setattr(round_, "send", cut)
    north, south = store.campaign.sites
    go_on(store, 1, north)
    store.leave_out_late(1)
    assert store.asked_round(2, north) == 1 and store.asked_round(2, south) == 2


def test_where_all_hang_the_grace_is_the_end(tmp_path: Path) -> None:
    store = store_of(tmp_path, deadline_minutes=0.01, grace_minutes=0.01)
    store = saying(store, tmp_path, north="sleep 60", south="exec sleep 60")
    began = time.monotonic()
    collect_here(store, 1)
    assert time.monotonic() - began < 15 and len(store.left_out(1)) == 2


def test_a_question_over_ssh_ends_long_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(transfer, "ssh", lambda _: ["sh", "-c", "exec sleep 60"])
    store, began = store_of(tmp_path), time.monotonic()
    far = store.campaign.sites[0].model_copy(update={"host": "far"})
    go_on(store, 1, far)
    assert time.monotonic() - began < 15
    assert store.state(1, far).text.startswith("unreachable: north does not answer")


def test_whatever_is_raised_at_the_seam_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("\x1b[2Jno room")

    store = saying(store_of(tmp_path), tmp_path, north=say(READY))
    monkeypatch.setattr(round_, "read_answer", explode)
    go_on(store, 1, store.campaign.sites[0])
    state = store.state(1, store.campaign.sites[0])
    assert state.failures == 1 and "unexpected MemoryError: \\x1b[2Jno room" in state.text


def test_what_a_terminal_would_obey_is_shown_escaped(tmp_path: Path) -> None:
    loud = 'printf "atoll: \\033[2Jgone\\n" >&2; exit 2'
    why = say('{"state": "refused", "why": "\\u001b[31mred\\u202e"}')
    store = saying(store_of(tmp_path), tmp_path, north=loud, south=why)
    for each in store.campaign.sites:
        go_on(store, 1, each)
        text = store.state(1, each).text
        assert text.isprintable() and "\\x1b[" in text


@pytest.mark.login_node
def test_only_what_the_manifest_names_is_fetched(tmp_path: Path) -> None:
    update = made(tmp_path, "north")
    with open(update / "beside.bin", "wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(update / "pipe")
    (update / "link.safetensors").symlink_to("/etc/passwd")
    (update / "folder").mkdir()
    store = saying(store_of(tmp_path), tmp_path, north=say(READY))
    go_on(store, 1, store.campaign.sites[0])
    assert sorted(path.name for path in store.updates(1)[0].iterdir()) == [
        "delta-model.safetensors",
        "manifest.json",
    ]


@pytest.mark.login_node
def test_an_update_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rsync does not see to it: after a power cut an honest facility would be left out."""
    made(tmp_path, "north")
    store = saying(store_of(tmp_path), tmp_path, north=say(READY))
    synced, sync = set[str](), os.fsync

    def noted(file: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    go_on(store, 1, store.campaign.sites[0])
    [update] = store.updates(1)
    assert {path.name for path in update.iterdir()} < synced


@pytest.mark.login_node
def test_a_link_is_not_followed_where_the_manifest_names_it(tmp_path: Path) -> None:
    """Nothing of the file that it leads to comes."""
    update = made(tmp_path, "north")
    (update / "delta-model.safetensors").rename(tmp_path / "private")
    (update / "delta-model.safetensors").symlink_to(tmp_path / "private")
    store = saying(store_of(tmp_path), tmp_path, north=say(READY))
    go_on(store, 1, store.campaign.sites[0])
    assert [path.name for path in store.updates(1)[0].iterdir()] == ["manifest.json"]


@pytest.mark.login_node
def test_a_file_that_is_longer_than_it_was_said_does_not_come(tmp_path: Path) -> None:
    update = made(tmp_path, "north")
    manifest = json.loads((update / "manifest.json").read_text())
    manifest["files"]["small.safetensors"] = {"bytes": 3, "sha256": "0" * 64}
    (update / "manifest.json").write_text(json.dumps(manifest))
    with open(update / "small.safetensors", "wb") as file:
        file.truncate(99)  # less than the other, which is as long as it was said
    store = saying(store_of(tmp_path), tmp_path, north=say(READY))
    partial = store.round(1) / "north" / ".update.partial"
    partial.mkdir(parents=True)
    (partial / "delta-model.safetensors").write_bytes(b"came before")
    (partial / "other.safetensors").touch()
    go_on(store, 1, store.campaign.sites[0])
    assert sorted(path.name for path in store.updates(1)[0].iterdir()) == [
        "delta-model.safetensors",
        "manifest.json",
    ], "what is missing is found where it is read"


@pytest.mark.parametrize("kind", ["huge", "pipe", "nested", "binary", "absent", "larger"])
def test_a_hostile_update_is_counted_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    update = made(tmp_path, "north")
    manifest = update / "manifest.json"
    content = manifest.read_text()
    manifest.unlink()
    if kind == "huge":
        with open(manifest, "wb") as file:
            file.truncate(200 << 20)
    elif kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "nested":
        manifest.write_text("[" * 100_000)
    elif kind == "binary":
        manifest.write_bytes(b"\xff\xfe\x00")
    elif kind == "larger":
        facts = {"bytes": 1 << 30, "sha256": "0" * 64}
        values = json.loads(content) | {"files": {"x.safetensors": facts}}
        manifest.write_text(json.dumps(values))
    store = saying(store_of(tmp_path), tmp_path, north=say(READY))
    go_on(store, 1, store.campaign.sites[0])
    assert store.state(1, store.campaign.sites[0]).failures == 1
    assert not [path for path in (store.round(1) / "north").iterdir() if path.name != ".lock"]


@pytest.mark.parametrize(
    ("claims", "found"),
    [
        ({"tokens": 10**15}, "tokens, at most 640 were asked for"),
        ({"tokens": 641}, "says 641 tokens"),
        ({"steps": 11}, "says 11 steps, at most 10"),
        ({"encoding": "fp32"}, "says encoding=fp32, this round is int8"),
        ({"tokens": 10**400}, "is no manifest"),
        ({"image": ["x"]}, "is no manifest"),
    ],
)
def test_a_manifest_claims_no_more_than_was_asked(
    tmp_path: Path, claims: dict[str, Any], found: str
) -> None:
    store = store_of(tmp_path)
    check_update(store, 1, store.campaign.sites[0], made(tmp_path, "north"))
    update = made(tmp_path / "other", "north", **claims)
    with pytest.raises(UserError, match=found):
        check_update(store, 1, store.campaign.sites[0], update)


@pytest.mark.parametrize(
    ("sites", "found"),
    [
        ([{"name": "a", "folder": "x"}, {"name": "A", "folder": "y"}], "two facilities are called"),
        ([{"name": "global", "folder": "x"}], "cannot be called global"),
        ([{"name": "a", "folder": "x"}, {"name": "b", "folder": "x/"}], "two facilities share"),
        ([{"name": "a", "folder": "x", "host": "-oProxyCommand=touch y"}], "sites.0.host"),
        ([{"name": "a", "folder": "x", "host": "me@-oProxyCommand=x"}], "sites.0.host"),
        ([{"name": "a", "folder": "x", "host": "a b"}], "sites.0.host"),
        ([{"name": "a", "folder": "-x"}], "sites.0.folder"),
        ([{"name": "a", "folder": "x\ny"}], "sites.0.folder"),
    ],
)
def test_facilities_are_told_apart_and_are_no_options(
    tmp_path: Path, sites: list[dict[str, Any]], found: str
) -> None:
    with pytest.raises(UserError, match=found) as error:
        store_of(tmp_path, sites=sites)
    assert error.value.found.isprintable()


OUTCOME = {"short": "1 updates are left", "rejected": {"north": "too long"}, "unreadable": {}}


def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> CampaignStore:
    """Two updates, one of which the aggregation leaves out, where two are the quorum."""
    store = store_of(tmp_path, rule={"quorum": 2, "below_quorum": rule})
    for each in store.campaign.sites:
        store.update(1, each).mkdir(parents=True)

    def aggregate(_: CampaignStore, __: int, folders: list[Path], **about: str) -> Any:
        return OUTCOME if folders else {"weights": {}, **about}

    monkeypatch.setattr(averaging, "_aggregate", aggregate)
    return store


def test_who_was_left_out_below_the_quorum_is_asked_again_then_a_person_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = below(tmp_path, monkeypatch, "ask")
    assert not averaging.average(store, 1)
    north, south = store.campaign.sites
    assert store.unsettled(1) == [north] and store.state(1, south).settled
    store.update(1, north).mkdir()
    with pytest.raises(UserError, match=r"1 updates are left.*\n.*below_quorum=hold"):
        averaging.average(store, 1)
    assert store.unsettled(1) == [north], "typed again, it is asked again"


def test_a_kill_while_a_wrong_update_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one is damaged: of two that contradict each other the other would be the model."""
    store = below(tmp_path, monkeypatch, "ask")
    north = store.campaign.sites[0]

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).is_dir():
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(averaging.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            averaging.average(store, 1)
    assert store.state(1, north).failures == 1 and store.unsettled(1) == [north]
    left = store.update(1, north).with_name(averaging.WRONG)
    assert left.is_dir() and [folder.parent.name for folder in store.updates(1)] == ["south"]
    store.update(1, north).mkdir()
    with pytest.raises(UserError, match="1 updates are left"):
        averaging.average(store, 1)
    assert not left.exists()


def test_below_the_quorum_a_round_waits_or_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = below(tmp_path / "a", monkeypatch, "wait")
    slept: list[float] = []
    monkeypatch.setattr(averaging.time, "sleep", slept.append)
    for _ in range(9):
        assert not averaging.average(store, 1)
        store.update(1, store.campaign.sites[0]).mkdir()
    assert slept[:4] == [0.05, 0.1, 0.2, 0.4], "the same wrong updates come again each time"
    coordinator._open_again(store, 1)
    assert not averaging.average(store, 1) and slept[-1] == 0.05, "typed again, it begins anew"
    assert capsys.readouterr().out == 2 * "round 1: 1 updates are left: waiting for more\n"
    store = below(tmp_path / "b", monkeypatch, "hold")
    assert averaging.average(store, 1)
    assert store.journal(1).last("averaged")["held"] == "1 updates are left"


@pytest.mark.parametrize("rule", ["ask", "wait", "hold"])
def test_the_step_of_an_engine_decides_nothing_below_the_quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Its end would be the engine's to judge, which starts it again, and the round without end."""
    store = below(tmp_path, monkeypatch, rule)
    keep_settings(store)
    assert round_.main([str(store.folder), "1", "average"]) == 0
    assert len(store.updates(1)) == 2 and not store.journal(1).records()


def test_an_update_of_who_has_left_blocks_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong in it came again each time, as nobody was asked for another."""
    store = below(tmp_path, monkeypatch, "ask")
    [_, south] = store.campaign.sites
    alone = store.campaign.model_copy(update={"sites": [south]})
    store = CampaignStore(alone, store.folder)
    with pytest.raises(UserError, match="1 updates are left"):
        averaging.average(store, 1)
    assert [folder.parent.name for folder in store.updates(1)] == ["south"]
    assert store.journal(1).records("wrong")[0]["facility"] == "north"


def test_a_round_that_waits_is_typed_again(tmp_path: Path) -> None:
    """Who failed may be mended now, and has its attempts again."""
    store = store_of(tmp_path, rule={"below_quorum": "wait"})
    coordinator._open_again(store, 1)
    assert request(store, 1, store.campaign.sites[0])["attempts"] == 2
    store.journal(1).append("reopened", waits=True)
    for _ in range(2):
        coordinator._open_again(store, 1)
        assert request(store, 1, store.campaign.sites[0])["attempts"] == 4
    store = store_of(tmp_path / "ask")  # which lets late work go, and was killed then
    store.journal(2).append("reopened", waits=True)
    coordinator._open_again(store, 2)
    assert len(store.journal(2).records("reopened")) == 1


@pytest.mark.login_node
def test_a_full_disk_here_is_no_facilitys_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of them would be left out, one after the other."""
    made(tmp_path, "north")
    store = saying(
        store_of(tmp_path, train=["data.sequence_tokens=16"]), tmp_path, north=say(READY)
    )
    [north] = store.campaign.sites

    def stopped(*_: object) -> None:
        raise UserError("north: rsync stopped (code 11)", "try it")

    monkeypatch.setattr(round_, "fetch", stopped)
    go_on(store, 1, north)
    assert store.state(1, north).failures == 1, "there is room, so it is the facility's"
    (store.update(1, north).parent / ".room").symlink_to("/dev/full")
    with pytest.raises(transfer.NoRoom, match="No space left on device"):
        go_on(store, 1, north)
    assert store.state(1, north).failures == 1


def test_an_error_of_this_disk_is_no_facilitys_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path)
    [north, *_] = store.campaign.sites

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(round_, "bring_models", full)
    store.folder.mkdir(parents=True, exist_ok=True)
    (store.folder / ".room").symlink_to("/dev/full")
    with pytest.raises(transfer.NoRoom, match="No space left on device"):
        go_on(store, 1, north)
    assert store.state(1, north).failures == 0


def test_nobody_is_asked_while_a_maker_that_was_left_behind_makes_the_round(
    tmp_path: Path,
) -> None:
    """Else what comes meanwhile is in no model, and verified by none."""
    store = store_of(tmp_path)
    store.round(1).mkdir(parents=True)
    made, waited = threading.Event(), threading.Event()

    def wait() -> None:
        coordinator._wait_for_maker(store, 1)
        assert made.is_set()
        waited.set()

    with one_writer(store.model(1)):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not waited.wait(0.2)
        made.set()
    waiting.join()
    assert waited.is_set()


def test_a_model_that_was_made_while_nobody_looked_is_noted(tmp_path: Path) -> None:
    """Its maker was not killed with the coordinator; the report tells of rounds by this line."""
    store = store_of(tmp_path)
    store.model(1).mkdir(parents=True)
    manifest = {"weights": {"north": 1.0}, "rejected": {}, "master": {}}
    (store.model(1) / "manifest.json").write_text(json.dumps(manifest))
    for _ in range(2):
        assert averaging.average(store, 1)
    [record] = store.journal(1).records("averaged")
    assert record["weights"] == {"north": 1.0} and "master" not in record


def test_a_round_that_is_made_is_noted_before_facilities_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is a target's by how many there were."""
    store = store_of(tmp_path, rounds=1)
    shutil.copytree(store.model(0), store.model(1))
    monkeypatch.setattr(coordinator, "round_line", lambda *_: "made")
    assert coordinator._rounds(store) == 1
    assert store.journal(1).last("averaged")["facilities"] == 2


def test_the_loss_of_late_work_is_of_another_model(tmp_path: Path) -> None:
    store = store_of(tmp_path, rule={"max_staleness": 1}, target_loss=1.0)
    north, south = store.campaign.sites
    store.leave_out(1, south, "late", late=True)
    for each, loss in ((north, 2.0), (south, 0.5)):
        store.update(2, each).mkdir(parents=True)
        store.record_answer(2, each, {"state": "ready", "losses": [loss, loss - 0.1]})
    assert store.losses(2) == [[2.0, 1.9]] and store.global_loss(1) == 2.0


def test_deleted_updates_change_no_losses(tmp_path: Path) -> None:
    """Nor does a facility that has left: its update is in the model."""
    store = store_of(tmp_path)
    for each, loss in zip(store.campaign.sites, (2.0, 3.0), strict=True):
        store.record_answer(1, each, {"state": "ready", "losses": [loss]})
    store.model(1).mkdir(parents=True)
    manifest = {"weights": {"north": 0.5, "south": 0.5}, "rejected": {}}
    (store.model(1) / "manifest.json").write_text(json.dumps(manifest))
    assert store.losses(1) == [[2.0], [3.0]]
    left = store.campaign.model_copy(update={"sites": store.campaign.sites[:1]})
    store = CampaignStore(left, store.folder)
    assert store.losses(1) == [[2.0], [3.0]]
    assert [site.name for site in store.facilities(1)] == ["north", "south"]


def test_a_campaign_may_choose_another_way_on_later(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    keep_settings(store)
    rule = store.campaign.rule.model_copy(update={"below_quorum": "hold"})
    keep_settings(CampaignStore(store.campaign.model_copy(update={"rule": rule}), store.folder))
    rule = store.campaign.rule.model_copy(update={"quorum": 2})
    with pytest.raises(UserError, match=r"was begun with rule\.quorum=1"):
        keep_settings(CampaignStore(store.campaign.model_copy(update={"rule": rule}), store.folder))


def test_one_of_two_cannot_end_a_campaign_by_its_losses(tmp_path: Path) -> None:
    store = store_of(tmp_path, target_loss=1.0)
    for each, loss in zip(store.campaign.sites, (0.0, 1.5), strict=True):
        store.update(1, each).mkdir(parents=True)
        store.record_answer(1, each, {"state": "ready", "losses": [loss]})
    assert store.mean_losses(1) == (0.75, 0.75)
    assert not coordinator._reached_target(store, 1)


@pytest.mark.parametrize(
    ("count", "said", "reached"),
    [
        (1, [[0.9]], True),
        (2, [[0.0]], False),  # the other is late
        (2, [[0.0], []], False),
        (2, [[0.9], [0.8]], True),
        (3, [[0.0]], False),
        (3, [[0.0], []], False),
        (3, [[0.0], [1.5]], False),
        (3, [[0.0], [1.5], [1.4]], False),
        (3, [[0.9], [0.8]], True),
        (3, [[0.9], [0.8], [1e6]], True),
        (4, [[0.0], [0.9]], False),
        (4, [[0.0], [0.9], [1.5]], True),
        (5, [[0.0], [0.9], [1.5], [1.5]], False),
    ],
)
def test_it_takes_most_facilities_to_end_a_campaign(
    tmp_path: Path, count: int, said: list[list[float]], reached: bool
) -> None:
    sites = [{"name": f"f{n}", "folder": str(tmp_path / f"f{n}")} for n in range(count)]
    store = store_of(tmp_path, target_loss=1.0, sites=sites)
    for each, losses in zip(store.campaign.sites, said, strict=False):
        store.update(1, each).mkdir(parents=True)
        store.record_answer(1, each, {"state": "ready", "losses": losses})
    assert coordinator._reached_target(store, 1) is reached


def test_facilities_that_leave_later_make_no_old_round_the_last(tmp_path: Path) -> None:
    """Two of five had reached the target: they are most of the three that stayed."""
    sites = [{"name": f"f{n}", "folder": str(tmp_path / f"f{n}")} for n in range(5)]
    store = store_of(tmp_path, target_loss=1.0, sites=sites)
    for each in store.campaign.sites[:2]:
        store.record_answer(4, each, {"state": "ready", "losses": [0.9]})
    manifest = {"weights": {"f0": 0.5, "f1": 0.5}, "rejected": {}}
    run_dir.write_whole(store.model(4) / "manifest.json", json.dumps(manifest))
    assert averaging.average(store, 4)
    assert not coordinator._reached_target(store, 4)
    fewer = store.campaign.model_copy(update={"sites": store.campaign.sites[:3]})
    store = CampaignStore(fewer, store.folder)
    assert averaging.average(store, 4)
    assert not coordinator._reached_target(store, 4)


def test_kills_are_no_attempts_of_a_facility(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times it was cut off after it had handed its job over; three failures are the end."""
    journal = Journal(tmp_path / "round-001")
    for _ in range(5):
        journal.append("submitted", run="r")
    run: Any = SimpleNamespace(facility=SimpleNamespace(scheduler="slurm"))
    monkeypatch.setattr(site.run_dir, "folder", lambda _: tmp_path / "run")
    monkeypatch.setattr(site, "run_command", lambda _, environment: Finished(0, "", ""))
    monkeypatch.setattr(site, "status", lambda _: ("failed", "why"))
    request = {"attempts": 3, "facilities_here": 1}
    for _ in range(3):
        assert site._submitted(journal.folder, run, [], request, "why") == ("retry", "why")
    assert site._submitted(journal.folder, run, [], request, "why")[0] == "failed"


def asking(campaign: str, number: int = 1, **changes: Any) -> str:
    asked = {
        "campaign": campaign, "round": number, "facility": "north", "base": BASE, "codec": "int8",
        "global_round": number - 1, "attempts": 3, "signing_key": None, "overrides": [],
    }  # fmt: skip
    return json.dumps(asked | changes)


def test_two_campaigns_that_ask_at_one_instant_are_not_both_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "advance", lambda *_: {"state": "running"})
    for attempt in range(20):
        together, folder = threading.Barrier(2), tmp_path / f"x{attempt}"

        def ask(name: str, together: Any = together, folder: Path = folder) -> bool:
            together.wait()
            number = 1 + (name == "two")  # not even of another round
            try:
                site.main([str(folder), str(number), "--request", asking(name, number)])
            except UserError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(ask, ["one", "two"])) == [False, True]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"facility": "../../x"}, "facility"),
        ({"overrides": [3]}, "overrides.0"),
        ({"codec": "int7"}, "codec"),
        ({"extra": 1}, "extra"),
        ({"fragments": 2, "fragment": 2}, "fragment 2 of 2"),
        ({"merge_alpha": 1.0}, "merge_alpha"),
        ({"round": 2}, "round 1 with a request for 2"),
    ],
)
def test_a_request_is_typed(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError, match=found):
        site.main([str(tmp_path / "x"), "1", "--request", asking("c", **changes)])


FORBIDDEN = [
    "facility.step=[bash,-c,id]", "facility.binds=[/home]", "facility.modules.load=[evil]",
    "facility.modules={load:[evil]}", "facility.environment.LD_PRELOAD=x.so", "image.file=x.sif",
    "image.run_flags=[--bind]", "folders.runs=/tmp", "folders={runs:x}", "facility.scheduler=none",
    "facility.submit.wrap=id", "+facility.submit.export=ALL", "model.source=/etc",
    "++model.lora.start=x",
    "tokenizer.path=/etc", "tokenizer.chat_template=own.jinja",
    "data.sources=[{name:a,files:[/etc/passwd]}]",
    "data.files=[/etc/passwd]", "data.files=[../../x]", "data.files=['~/x']",
    "data.text_field='${oc.env:HOME}'", "data.validation={files:[/etc/passwd]}", "loggers=[wandb]",
    "facility.ssh_options=['-oProxyCommand=id']", "override=[fit]", "~facility.binds",
    "facility.budget.command=[id]", "confirm.node_hours=null",
    "evaluation.tasks_folder=tasks", "evaluation={tasks:[a],tasks_folder:tasks}",
    "++sharding.deepspeed.torch_autocast={enabled:true,lower_precision_safe_modules:[evil.X]}",
    "+sharding.deepspeed.wandb={enabled:true}", "sharding.deepspeed={compile:{backend:os.system}}",
    "sharding={deepspeed:{}}", "model.config={auto_map:{AutoConfig:evil.X}}",
    "+model.config.attn_implementation=evil/kernel", "data.hub_files={train:['file:///etc/passwd']}",
    "+model.config.rope_parameters={rope_type:evil}", "~local", "~local=default", "local=null",
    "~training.epochs", "facility.submit.l=['select=5000:ncpus=1','walltime=999:00:00']",
    "facility.limits.max_nodes=5000", "facility.limits={max_walltime_minutes:null}",
    "~facility.limits", "facility.unsupported=null", "facility.node.peak_tflops=1e9",
    "restart.max_restarts=1000000",
    # what stays in the folder, and looks like nothing
    "facility.binds=[home]", "facility.node_folder=own", "facility.network=own",
    "facility.container=own", "override=[own]",
    "facility.hosts_file=own", "facility.task_binding=[own]", "facility.task_folders={A:own}",
    "facility.address_suffix=own", "facility.driver=own", "facility.submit={wrap:id}",
    "facility.step=[own]", "facility.modules=[own]", "facility.environment={A:own}",
    "facility.ssh_options=[own]", "facility.scheduler=own", "facility.budget={command:[own]}",
    "model.source=own", "model.lora.start=own", "tokenizer.path=own", "launcher={name:own}",
    "tokenizer.chat_template=own", "checkpoint.initial_load_path=own", "folders.runs=own",
    "checkpoint.optimizer_load_path=own", "evaluation.tasks_folder=own", "loggers=[own]",
    "sharding.deepspeed={own:own}", "image.file=own", "confirm={node_hours:9}", "restart=null",
]  # fmt: skip


@pytest.mark.parametrize("word", FORBIDDEN)
def test_a_request_changes_nothing_that_runs_or_leaves_the_folder(
    tmp_path: Path, word: str
) -> None:
    with pytest.raises(UserError, match="does not let a request change") as error:
        refuse_settings(["training.steps=3", word], tmp_path)
    name = word.lstrip("+~").partition("=")[0]
    assert f"a line '{name}'" in error.value.hint
    (tmp_path / "site.allow").write_text(f"# ours\ndefault\n{name}  # as agreed\n")
    refuse_settings(["training.steps=3", word], tmp_path)


def made_key(path: Path, passphrase: str = "") -> str:
    """A private key; the kind and key of its public half."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)]
    path.with_name(f"{path.name}.pub").unlink(missing_ok=True)
    subprocess.run(argv, check=True)
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


@pytest.mark.login_node
def test_a_facility_says_which_key_a_request_signs_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "advance", lambda *_: {"state": "running"})
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "camp"
    folder.mkdir()
    (folder / "site.allow").write_text("default\n")
    (folder / "link").symlink_to(tmp_path / "id_ed25519")
    for key in (tmp_path / "id_ed25519", tmp_path / "atoll_update", folder / "own"):
        made_key(key)

    def ask(key: str) -> int:
        return site.main([str(folder), "1", "--request", asking("c", signing_key=key)])

    for key in ("~/id_ed25519", str(tmp_path / "id_ed25519"), f"{folder}/../x", f"{folder}/link"):
        with pytest.raises(UserError, match="does not let a request sign with") as error:
            ask(key)
        assert f"a line 'signing_key={key}' in {folder / 'site.allow'}" in error.value.hint
    (folder / "site.allow").write_text("default\nsigning_key=~/atoll_update\n")
    with pytest.raises(UserError, match="sign with '~/id_ed25519'"):
        ask("~/id_ed25519")
    assert not (folder / "campaign.json").exists()
    assert ask(str(tmp_path / "atoll_update")) == 0
    (folder / "rounds" / "round-001" / "journal.jsonl").unlink()
    assert ask(str(folder / "own")) == 0
    (folder / "own").unlink()
    made_key(folder / "own", passphrase="a question")
    with pytest.raises(UserError, match=r"nothing can be signed with .*own: .*passphrase"):
        ask(str(folder / "own"))
    (folder / "own").unlink()
    with pytest.raises(UserError, match="own here to sign with"):  # not when it has been trained
        ask(str(folder / "own"))
    capsys.readouterr()


HUB = ["data=hub", "data.hub=null"]


def test_a_file_named_within_a_group_lies_in_the_folder_too(tmp_path: Path) -> None:
    words = [
        "data=text_files",
        "data.files=[a.txt]",
        "data.validation={files:[private.txt],fraction:null}",
    ]
    run = compose(["facility=laptop", "model=llama_tiny", *words]).run
    with pytest.raises(UserError, match=r"data\.validation\.files"):
        refuse_outside(run, words[2:], tmp_path / "folder")


@pytest.mark.parametrize(
    "words", [["data.hub=private"], ["data.sources=[{name: a, hub: private}]"]]
)
def test_a_folder_here_is_no_dataset_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    run = compose(["facility=laptop", "model=llama_tiny", *HUB, *words]).run
    with pytest.raises(UserError, match="outside"):
        refuse_outside(run, words, tmp_path / "folder")
    refuse_outside(run, words, tmp_path)


def test_a_facility_may_list_less_than_the_default(tmp_path: Path) -> None:
    words = ["facility=leonardo", "nodes=2", "sharding=auto", "optimizer.learning_rate=1e-3"]
    words += ["facility.submit.partition=x", "facility.account=y", f"data.files=[{tmp_path}/a.txt]"]
    words += ["sharding=deepspeed_zero1", "model.config.hidden_size=8", "model.config.model_type=a"]
    refuse_settings(words, tmp_path)
    (tmp_path / "site.allow").write_text("training.*\n")
    refuse_settings(["training.steps=3"], tmp_path)
    with pytest.raises(UserError, match="change nodes to '2'"):
        refuse_settings(["nodes=2"], tmp_path)


def test_a_request_that_was_kept_is_held_to_what_the_facility_allows_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job failed, or was killed; meanwhile the facility's owner allows less."""
    for name in ("refuse_wrong_base", "prune_states"):
        monkeypatch.setattr(site, name, lambda *_: None)
    monkeypatch.setattr(site, "make_bases", lambda *_: 1)
    monkeypatch.setattr(site, "_overrides", lambda *_: [])
    kept = {"global_round": 1, "overrides": ["nodes=2"], "frozen": None, "signing_key": None}
    (tmp_path / "site.allow").write_text("training.*\n")
    how = argparse.Namespace(receive=False, measure=False)
    with pytest.raises(UserError, match="change nodes to '2'"):
        site._advance(tmp_path, 1, kept | {"keep_checkpoints": 2}, how)


def test_round_1000_follows_round_999(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (100, 998, 999):
        (tmp_path / "rounds" / round_name(number) / "residual").mkdir(parents=True)
    words: list[str] = []
    monkeypatch.setattr(site, "run_atoll", lambda argv, _: words.extend(argv))
    monkeypatch.setattr(site, "container_of", lambda *_: [])
    monkeypatch.setattr(site.run_dir, "digest", lambda _: "x")
    monkeypatch.setattr(site.run_dir, "prepared_digest", lambda _: "x")
    monkeypatch.setattr(site.run_dir, "folder", lambda _: tmp_path / "run")
    here = tmp_path / "rounds" / round_name(1000)
    (here / "made").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text("{}")
    names: dict[str, Any] = {"campaign": "c", "round": 1000, "facility": "f", "codec": "int8"}
    names |= {"signing_key": None, "overrides": [], "frozen": None}
    names |= {"fragments": 1, "fragment": 0, "fragment_pattern": "strided"}
    site._make_update(tmp_path, here, FakeRun(), names, tmp_path)  # type: ignore[arg-type]
    before = words[words.index("--previous-residual") + 1]
    assert before == str(tmp_path / "rounds" / "round-999" / "residual")


class FakeRun:
    class image:
        file, name = None, "none"

    def model_dump(self, **_: object) -> dict[str, Any]:
        return {}


def test_a_call_ends_with_what_it_runs(tmp_path: Path) -> None:
    from atoll.campaign.calls import NO_ANSWER, call

    began = time.monotonic()
    done = call(["sh", "-c", "sleep 30 & echo words; exit 3"])
    assert (done.returncode, done.stdout) == (3, "words\n") and time.monotonic() - began < 10
    assert call(["sh", "-c", "exec >&- 2>&-; sleep 30"], lambda _: True).returncode == NO_ANSWER
    assert call([str(tmp_path / "none")]).returncode == 127
    assert call([sys.executable, "-c", "print('ü' * 9)"]).stdout == "ü" * 9 + "\n"


@pytest.mark.parametrize("codec", ["sparse", "topk"])
def test_an_encoding_that_loses_with_a_step_is_refused(tmp_path: Path, codec: str) -> None:
    with pytest.raises(UserError, match=rf"codec={codec} with rule\.update=nesterov learns less"):
        store_of(tmp_path, codec=codec, rule={"update": "nesterov"})
    with pytest.raises(UserError, match=rf"codec={codec} with rule\.combine=median"):
        store_of(tmp_path, codec=codec, rule={"combine": "median"})
    store_of(tmp_path, codec=codec)


def test_two_bits_go_with_no_momentum_in_a_new_campaign(tmp_path: Path) -> None:
    nesterov = {"update": "nesterov"}
    store = store_of(tmp_path, codec="int2", rule=nesterov)
    with pytest.raises(UserError, match=r"codec=int2 with rule\.update=nesterov: with nesterov it"):
        refuse_what_loses(store)
    keep_settings(store)
    refuse_what_loses(store)
    refuse_what_loses(store_of(tmp_path / "other", codec="int2"))
    refuse_what_loses(store_of(tmp_path / "third", codec="int4", rule=nesterov))


def test_site_is_typed() -> None:
    assert Site(name="a", host="me@login01.example.org", folder="x y").host


def test_a_host_whose_shell_talks_does_not_end_a_round_of_streamflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.campaign import streamflow

    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text("#!/bin/sh\necho 'Welcome!'; echo /there\n")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    store = store_of(tmp_path)
    north, south = store.campaign.sites
    talkative = north.model_copy(update={"host": "north"})
    assert streamflow._answering(store, 1, [talkative, south]) == {"south": None}
    assert "which is no folder" in store.state(1, north).text
    assert store.state(1, north).failures == 1


def test_an_engines_average_waits_for_whoever_is_still_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that took longer than the engine's step was left out of the round in silence."""
    store = store_of(tmp_path)
    keep_settings(store)
    averaged: list[int] = []
    monkeypatch.setattr(round_, "average", lambda _, number, **__: averaged.append(number))
    north, south = store.campaign.sites
    store.update(1, north).mkdir(parents=True)
    words = [str(store.folder), "1", "average"]
    assert round_.main(words) == 0 and averaged == []
    store.leave_out(1, south, "late")
    assert round_.main(words) == 0 and averaged == [1]


@pytest.mark.parametrize("update", ["momentum", "nesterov", "adam", "yogi"])
def test_int2_goes_with_replace_alone(tmp_path: Path, update: str) -> None:
    rule = {"update": update, "learning_rate": 0.003}
    with pytest.raises(UserError, match=f"codec=int2 with rule.update={update}"):
        refuse_what_loses(store_of(tmp_path, codec="int2", rule=rule))


@pytest.mark.parametrize("update", ["adam", "yogi"])
def test_a_rate_that_replaces_the_model_is_refused(tmp_path: Path, update: str) -> None:
    with pytest.raises(UserError, match="learning_rate=1: that is about how far") as refusal:
        refuse_what_loses(store_of(tmp_path, rule={"update": update}))
    assert "rule.learning_rate=0.003" in refusal.value.hint
    slower = {"update": update, "learning_rate": 0.003}
    refuse_what_loses(store_of(tmp_path / "other", rule=slower))
