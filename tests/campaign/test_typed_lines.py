"""Lines of `atoll federate` that are wrong: told before anything is written, and how to mend."""

import json
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_hostile_facilities import asking, made, made_key, store_of

from atoll import run_dir
from atoll.__main__ import main
from atoll.campaign import coordinator, site
from atoll.campaign import round as round_
from atoll.campaign.asked import refuse_unknown_samples, request
from atoll.campaign.journal import Journal, alone
from atoll.campaign.kept_request import attempts, keep_campaign, keep_request
from atoll.campaign.lasting_settings import refuse_missing_keys, refuse_what_loses, settings_to_keep
from atoll.campaign.store import CampaignStore, checked_campaign, load_store, settings_file
from atoll.campaign.suited import refuse_unsuited, refuse_what_cannot_compose
from atoll.campaign.transfer import Unreachable
from atoll.commands import Finished
from atoll.config.compose import compose
from atoll.errors import UserError
from atoll.settings.federation import Site

CHATML = "tokenizer.chat_template=chatml"
DEMO = ["federate", "federation=demo"]
NORTH = '{name: north, folder: s/n, overrides: ["data.files=[json/*]"]}'
TRAIN = 'train=["experiment=demo","facility=laptop","data.sequence_tokens=9","{}"]'


def said(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The two lines in which a line ends that wrote nothing."""
    before = sorted(folder.rglob("*"))
    code = main([*DEMO, f"folder={folder}", *words])
    captured = capsys.readouterr()
    assert code == 2, captured.out
    assert len(captured.err.splitlines()) == 2, captured.err
    assert sorted(folder.rglob("*")) == before
    return captured.err


def retyped(store: CampaignStore, **changes: Any) -> CampaignStore:
    values = store.campaign.model_dump(mode="json") | changes
    return CampaignStore(checked_campaign(values), store.folder)


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["rule.quorum=4"], "rule.quorum=4, and there are 3 facilities"),
        (["rule.combine=trimmed_mean", "rule.trim=2"], "needs 5 facilities, and there are 3"),
        (["rule.combine=krum", "rule.krum_bad=1"], "needs 5 facilities, and there are 3"),
        (["rule.cap=0.3"], "rule.cap=0.3 of 3 facilities"),
        (["batch_samples=10"], "north: training.global_batch_samples (10) must be divisible by"),
        ([TRAIN.format("optimizer.learning_rat=1")], "north: unknown setting"),
        ([TRAIN.format("training.seed=yes")], "north: "),
        (["rule.fragments=8", "rounds=5"], "so 3 of them would never be averaged"),
        (["rule.combine=median", "rule.max_staleness=1"], "late work for as much as work in time"),
        (["rule.max_norm_ratio=inf"], "rule.max_norm_ratio"),
        (["sites.north.folder=x"], "sites.north.folder: the facilities are a list"),
        ([f"sites=[{NORTH},{NORTH.replace('north', 'east')}]"], "share s/n on this machine"),
        (
            [f"sites=[{NORTH},{NORTH.replace('north', 'east').replace('s/n', './s//n/')}]"],
            "share s/n on this machine",
        ),
    ],
)
def test_what_can_never_be_is_told_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    found: str,
    dry: list[str],
) -> None:
    assert found in said(tmp_path, capsys, *words, *dry)


@pytest.mark.parametrize(
    "word",
    [
        *("facility=of_their_own", "sharding=auto", "seed='${oc.env:SEED_THERE}'"),
        "tokenizer.chat_template=/no/where/here.jinja",
    ],
)
def test_what_only_a_facility_can_compose_is_left_to_it(tmp_path: Path, word: str) -> None:
    here = (
        ["experiment=demo"]
        if word.startswith("facility")
        else ["experiment=demo", "facility=laptop"]
    )
    store = store_of(tmp_path, train=[*here, word])
    (store.model(0) / "manifest.json").unlink()
    refuse_what_cannot_compose(store)
    mistyped = retyped(store, train=["experiment=demo", "optimizer.learning_rat=1"])
    refuse_what_cannot_compose(mistyped)  # its own local/ may choose a facility that knows it
    mistyped = retyped(mistyped, train=[*mistyped.campaign.train, "facility=laptop"])
    with pytest.raises(UserError, match="north: unknown setting"):
        refuse_what_cannot_compose(mistyped)
    (store.model(0) / "manifest.json").touch()
    settings_file(store.folder).touch()
    refuse_what_cannot_compose(mistyped)  # it was begun by another Atoll


def test_what_another_clone_gives_is_not_judged_here(tmp_path: Path) -> None:
    """Its local/ says how many devices a node has; this one's would refuse the sharding."""
    words = ["experiment=demo", "facility=generic_slurm", "sharding.tensor=4"]
    store = store_of(tmp_path, train=[*words, "data.sequence_tokens=128"])
    (store.model(0) / "manifest.json").unlink()
    with pytest.raises(UserError, match="must be divisible"):
        refuse_what_cannot_compose(store)
    sites = [site.model_copy(update={"host": "far"}) for site in store.campaign.sites]
    far = CampaignStore(store.campaign.model_copy(update={"sites": sites}), store.folder)
    refuse_what_cannot_compose(far)
    mistyped = retyped(far, train=["facility=of_their_own", "optimizer.learning_rat=1"])
    with pytest.raises(UserError, match=r"north: unknown setting: optimizer.learning_rat\n.*did"):
        refuse_what_cannot_compose(mistyped)


def test_a_campaign_that_changes_its_nodes_hears_what_does_not_fit(tmp_path: Path) -> None:
    words = ["experiment=demo", "facility=laptop", "sharding.tensor=3"]
    store = store_of(tmp_path, train=words)
    with pytest.raises(UserError, match=r"north is, is not known here.*must be divisible by"):
        refuse_unknown_samples(store)


def test_a_template_in_words_is_no_path(tmp_path: Path) -> None:
    """Of 300 letters, it is longer than a file's name may be."""
    template = "tokenizer.chat_template='" + 300 * "x" + "{{ messages }}</s>'"
    words = ["experiment=demo", "facility=laptop", "sharding.tensor=3"]
    store = store_of(tmp_path, train=[*words, template])
    (store.model(0) / "manifest.json").unlink()
    refuse_what_cannot_compose(store)  # a facility finds the sharding


def test_two_coordinators_of_one_campaign_are_one_after_the_other(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    kept = json.dumps(settings_to_keep(store))
    with alone(store.folder):  # while it makes its first model
        settings_file(store.folder).write_text(kept)
        with pytest.raises(UserError, match="another atoll federate is at"):
            coordinator.run(retyped(store, codec="int4"))
    assert settings_file(store.folder).read_text() == kept


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("train", "found"),
    [
        (
            ["experiment=llama_qlora_smoke"],
            "model.quantisation=nf4 where whole models travel",
        ),
        (
            ["task=preference", "data=preference_files", "data.files=[a.jsonl]", CHATML],
            "task.loss=dpo in rounds",
        ),
    ],
)
def test_runs_that_mean_something_else_in_rounds_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    train: list[str],
    found: str,
    dry: list[str],
) -> None:
    words = [f"train={json.dumps(['facility=laptop', *train])}"]
    words.append('sites=[{name: north, folder: s/n, overrides: ["nodes=1"]}]')
    assert f"north: {found}" in said(tmp_path, capsys, *words, *dry)


def test_a_facility_refuses_them_too(tmp_path: Path) -> None:
    """Whose settings the coordinator's clone may not know."""
    run = compose(["facility=laptop", "experiment=llama_qlora_smoke", "name=r"]).run
    with pytest.raises(UserError, match="lose what the last one learned"):
        refuse_unsuited(run, adapters_travel=False)
    refuse_unsuited(run, adapters_travel=True)


def test_one_folder_of_another_machine_is_one_however_it_is_written() -> None:
    values = {"name": "c", "start": []}
    for folder in ("x/", "./x", "y/../x"):
        sites = [{"name": "a", "host": "h", "folder": "~/x"}]
        sites += [{"name": "b", "host": "h", "folder": folder}]
        with pytest.raises(UserError, match="share x on h"):
            checked_campaign(values | {"sites": sites})


def test_home_folders_are_meant_as_they_are_written() -> None:
    """No shell reads them: ssh begins in the home folder there, and here it is ours."""
    there = Site(name="a", host="h", folder="~/x", command=["~/atoll/bin/python", "-m", "atoll"])
    assert there.folder == "x" and there.command[0] == "atoll/bin/python"
    here = Site(name="a", folder="~/x", command=["~/bin/atoll"])
    assert here.folder == str(Path.home() / "x") and here.command == [
        str(Path.home() / "bin/atoll")
    ]
    campaign = checked_campaign(
        {"name": "c", "start": [], "folder": "~/c", "sites": [here.model_dump()]}
    )
    assert campaign.folder == str(Path.home() / "c")
    for folder in ("~anna/x", "~"):
        with pytest.raises(UserError, match="no shell reads it"):
            checked_campaign(
                {"name": "c", "start": [], "sites": [{"name": "a", "host": "h", "folder": folder}]}
            )


@pytest.mark.login_node
def test_signatures_need_keys_and_files(tmp_path: Path) -> None:
    signers = tmp_path / "signers"
    store = store_of(tmp_path, allowed_signers=str(signers))
    with pytest.raises(UserError, match="and north has no key"):
        refuse_missing_keys(store.campaign)
    sites = [site.model_dump() | {"signing_key": "k"} for site in store.campaign.sites]
    campaign = retyped(store, sites=sites).campaign
    with pytest.raises(UserError, match=f"allowed_signers={signers}: no such file here"):
        refuse_missing_keys(campaign)
    key = made_key(tmp_path / "key")
    for names in ("", "north", "north,sauth"):
        signers.write_text(f"{names} {key}\n" if names else "")
        with pytest.raises(UserError, match=f"{signers} does not know (north|south): No principal"):
            refuse_missing_keys(campaign)
    signers.write_text(f"north {key}\nsou* {key}\n")
    refuse_missing_keys(campaign)
    with pytest.raises(UserError, match="signing_key=nowhere: no such file here"):
        refuse_missing_keys(retyped(store, sites=sites, signing_key="nowhere").campaign)
    refuse_missing_keys(retyped(store, sites=sites, signing_key=str(tmp_path / "key")).campaign)
    made_key(tmp_path / "locked", passphrase="a question")
    locked = retyped(store, sites=sites, signing_key=str(tmp_path / "locked")).campaign
    with pytest.raises(UserError, match=r"nothing can be signed with .*passphrase"):
        refuse_missing_keys(locked)


def test_an_older_openssh_cannot_tell_whose_keys_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh-keygen").write_text(
        "#!/bin/sh\necho 'Unsupported operation for -Y: \"match-principals\"' >&2; exit 1\n"
    )
    (tmp_path / "ssh-keygen").chmod(0o755)
    (tmp_path / "signers").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    store = store_of(tmp_path, allowed_signers=str(tmp_path / "signers"))
    sites = [site.model_dump() | {"signing_key": "k"} for site in store.campaign.sites]
    refuse_missing_keys(retyped(store, sites=sites).campaign)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "c"}'])
def test_a_folder_that_is_no_campaigns_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "demo").mkdir()
    settings_file(tmp_path / "demo").write_text(content)
    for words in ([], ["--dry-run"], ["--status"]):
        assert "campaign.json" in said(tmp_path, capsys, *words)


def test_a_campaign_that_is_not_there_has_no_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"no campaign in {tmp_path}/demo" in said(tmp_path, capsys, "--status")


def test_a_folder_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "folder=/proc/nowhere"]) == 2
    assert "/proc/nowhere/demo cannot be written" in capsys.readouterr().err


def test_a_dry_run_tells_of_changed_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of(tmp_path)
    settings_file(store.folder).write_text(json.dumps(settings_to_keep(store)))
    words = [f"sites={[{'name': s.name, 'folder': s.folder} for s in store.campaign.sites]}"]
    words = [word.replace("'", "") for word in words]
    shown = said(store.folder.parent, capsys, f"name={store.folder.name}", *words, "--dry-run")
    assert "was begun with" in shown


def test_what_was_mistyped_may_change_until_there_is_a_model(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    settings_file(store.folder).write_text(json.dumps(settings_to_keep(store)))
    other = retyped(store, start=["other"])
    with pytest.raises(UserError, match=r"was begun with start="):
        settings_to_keep(other)
    lost = retyped(store, codec="int2", rule={"update": "nesterov"})
    settings_file(store.folder).write_text(json.dumps(settings_to_keep(store)))
    refuse_what_loses(lost)  # one that has begun goes on
    (store.model(0) / "manifest.json").unlink()
    with pytest.raises(UserError, match="codec=int2"):
        refuse_what_loses(lost)
    assert settings_to_keep(other)["start"] == ["other"]


def test_a_facility_may_leave_whatever_the_cap_is(tmp_path: Path) -> None:
    """It may not be changed in a campaign's life; of fewer than it needs all weigh the same."""
    sites = [{"name": f"f{n}", "folder": str(tmp_path / f"f{n}")} for n in range(3)]
    store = store_of(tmp_path, sites=sites, rule={"cap": 0.34})
    refuse_what_loses(store)
    settings_file(store.folder).write_text(json.dumps(settings_to_keep(store)))
    fewer = retyped(store, sites=sites[:2])
    refuse_what_loses(fewer)
    assert len(settings_to_keep(fewer)["sites"]) == 2
    (store.model(0) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"rule\.cap=0\.34 of 2 facilities") as refusal:
        refuse_what_loses(fewer)
    assert "rule.cap=0.5 or more" in refusal.value.hint


def test_a_facility_may_change_while_its_first_model_is_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line was too slow for the deadline: what is mended then may be its folder."""
    store = store_of(tmp_path)
    settings_file(store.folder).write_text(json.dumps(settings_to_keep(store)))
    north = store.campaign.sites[0]

    def cut_off(*_: Any, **__: Any) -> None:
        raise Unreachable("north: rsync: cut off", "it goes on from there later")

    monkeypatch.setattr(round_, "_asked", lambda *_: {"state": "needs", "have": -1})
    monkeypatch.setattr(round_, "send", cut_off)
    round_.go_on(store, 1, north)
    assert store.state(1, north).has_worked, "it is late, and its model goes on"
    sites = [each.model_dump() | {"overrides": ["a=1"]} for each in store.campaign.sites]
    sites[0]["folder"] = "/elsewhere"
    other = retyped(store, sites=sites)
    assert settings_to_keep(other)["sites"][0]["folder"] == "/elsewhere"
    store.record_answer(1, north, {"state": "unreachable", "why": "cut off", "begun": True})
    with pytest.raises(UserError, match=r"was begun with sites\.north="):
        settings_to_keep(other)


def test_a_facility_may_change_until_it_took_work(tmp_path: Path) -> None:
    made(tmp_path, "north")
    store = store_of(tmp_path)
    settings_file(store.folder).write_text(json.dumps(settings_to_keep(store)))
    sites = [each.model_dump() | {"overrides": ["a=1"]} for each in store.campaign.sites]
    other = retyped(store, sites=sites)
    north = store.campaign.sites[0]
    store.count_failure(1, north, "no such program")
    for state in ("needs", "unreachable", "retry", "refused", "failed"):
        store.record_answer(1, north, {"state": state})
        assert settings_to_keep(other)["sites"][0]["overrides"] == ["a=1"]
    store.record_answer(1, north, {"state": "queued"})
    with pytest.raises(UserError, match=r"was begun with sites\.north="):
        settings_to_keep(other)
    reached = {"command": ["other"], "host": "login2", "signing_key": "k"}
    sites = [each.model_dump() | reached for each in store.campaign.sites]
    assert settings_to_keep(retyped(store, sites=sites))["sites"][0]["host"] == "login2"


def test_a_facility_at_work_gives_signs_of_life(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By them the coordinator tells work from a hang."""
    monkeypatch.setattr(site, "LIFE_SECONDS", 0.01)
    said, end = "", time.monotonic() + 60
    with site.signs_of_life():
        while said.count("\n") < 2 and time.monotonic() < end:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.strip() == "" and said.count("\n") >= 2


@pytest.mark.parametrize("name", ["global", "losses", "untrained", "journal.jsonl", "run.yaml"])
def test_a_facility_is_not_called_as_a_rounds_own_files(name: str) -> None:
    values = {"name": "c", "start": [], "sites": [{"name": name.upper(), "folder": "x"}]}
    with pytest.raises(UserError, match=f"a facility cannot be called {name.upper()}"):
        checked_campaign(values)


def test_a_facility_that_is_asked_twice_at_once_has_no_work_yet(tmp_path: Path) -> None:
    """Of a coordinator that was killed another `atoll site` may be at it, before any job."""
    here, how = tmp_path / "rounds" / "round-001", Namespace(measure=False)
    with alone(here):
        assert site.advance(tmp_path, 1, how)["state"] == "retry"
        Journal(here).append("submitted", run=str(tmp_path / "run"))
        assert site.advance(tmp_path, 1, how)["state"] == "running"


def test_a_job_does_what_was_asked_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that came later change neither what becomes of it nor what its update says."""
    here, how = tmp_path / "rounds" / "round-001", Namespace(measure=False, receive=False)
    said: list[Any] = []
    monkeypatch.setattr(site, "make_bases", lambda *_: 0)
    monkeypatch.setattr(site, "refuse_wrong_base", lambda *_: None)
    monkeypatch.setattr(site, "_make_update", lambda *words: said.append(words[2]))
    monkeypatch.setattr(site, "load_run", lambda path: path.read_text())
    run = tmp_path / "run"
    run.mkdir()
    run_dir.settings_file(run).write_text("as it was")
    asked = {"round": 1, "global_round": 0, "frozen": None, "overrides": ["no=such.setting"]}
    Journal(here).append("submitted", run=str(run))
    for state, expected in (("running", "running"), ("finished", "ready")):
        monkeypatch.setattr(site, "remembered_status", lambda _, state=state: (state, ""))
        assert site._advance(tmp_path, 1, asked, how)["state"] == expected
    assert said == ["as it was"]


def test_what_a_facility_does_not_allow_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are for a job to come."""
    folder = tmp_path / "camp"
    request = asking("c", overrides=["restart.max_restarts=9"])
    monkeypatch.setattr(site, "advance", lambda *_: {"state": "running"})
    monkeypatch.setattr(site, "remembered_status", lambda _: ("running", ""))
    with pytest.raises(UserError, match="does not let a request change"):
        site.main([str(folder), "1", "--request", request])
    run = folder / "runs" / "r"
    run.mkdir(parents=True)
    run_dir.settings_file(run).write_text("{}")
    keep_campaign(folder, "c")
    Journal(folder / "rounds" / "round-001").append("submitted", run=str(run))
    assert site.main([str(folder), "1", "--request", request]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    with pytest.raises(UserError, match="is of the campaign c, and other asks for it"):
        site.main([str(folder), "1", "--request", request.replace('"c"', '"other"')])
    assert not Journal(folder / "rounds" / "round-001").last("asked")


def test_how_runs_are_carried_out_may_change_at_any_time(tmp_path: Path) -> None:
    """A queue is renamed, a job needs more nodes: what is trained stays."""
    made(tmp_path, "north")
    store = store_of(tmp_path, train=["data=files", "sharding=ddp"])
    settings_file(store.folder).write_text(json.dumps(settings_to_keep(store)))
    store.record_answer(1, store.campaign.sites[0], {"state": "ready"})
    first, *others = [each.model_dump() for each in store.campaign.sites]
    words = ["facility.submit.partition=new", "nodes=2", "sharding=full_shard", "image=none"]
    other = retyped(store, sites=[first | {"overrides": words}, *others])
    assert settings_to_keep(other)["sites"][0]["overrides"] == words
    train = ["data=files", "training.microbatch_samples=1"]
    assert settings_to_keep(retyped(store, train=train))["train"] == train
    lost_words = ["data=hub", "++seed=1", "~data.fields", "experiment=mini_sft", "training.steps=9"]
    lost_words += ["+sharding.deepspeed.gradient_clipping=1", "sharding={name:x}", "local=default"]
    for lost in [*lost_words, "facility.walltime_minutes='${seed}'"]:
        with pytest.raises(UserError, match=r"was begun with sites\.north="):
            settings_to_keep(retyped(store, sites=[first | {"overrides": [lost]}, *others]))
        with pytest.raises(UserError, match=r"was begun with train="):
            settings_to_keep(retyped(store, train=[*train, lost]))
    with pytest.raises(UserError, match=r"was begun with sites\.north="):
        settings_to_keep(retyped(store, sites=[first | {"folder": "other"}, *others]))


def test_a_round_that_is_opened_again_has_its_attempts_again(tmp_path: Path) -> None:
    store = store_of(tmp_path, attempts=2)
    north = store.campaign.sites[0]
    assert request(store, 1, north)["attempts"] == 2
    store.journal(1).append("reopened", waits=True)  # nobody has looked at it
    assert request(store, 1, north)["attempts"] == 2
    store.journal(1).append("reopened", waits=False)
    assert request(store, 1, north)["attempts"] == 4


def test_a_facility_takes_a_corrected_request_until_a_job_was_taken(tmp_path: Path) -> None:
    here, run = tmp_path / "rounds" / "round-001", tmp_path / "run"
    journal, asked = Journal(here), {"round": 1, "facility": "north", "codec": "int8"}
    asked |= {"signing_key": "kye", "overrides": ["a=1"]}
    keep_request(here, 1, asked)
    for _ in range(2):
        journal.append("submitted", run=str(run))
        journal.append("refused", why="no text")
    run.mkdir()
    assert attempts(journal) == 2
    keep_request(here, 1, asked | {"overrides": ["a=2"]})
    assert journal.last("asked")["request"]["overrides"] == ["a=2"]
    assert attempts(journal) == 0 and not run.exists()
    keep_request(here, 1, asked | {"overrides": ["a=2"], "attempts": 5})
    journal.append("submitted", run=str(run))
    with pytest.raises(UserError, match="and now"):  # a kill may have cut its answer off
        keep_request(here, 1, asked | {"overrides": ["a=3"]})
    journal.append("refused", why="no text")
    with pytest.raises(UserError, match="has facility=north, and now east is asked for"):
        keep_request(here, 1, asked | {"facility": "east"})
    keep_request(here, 1, asked | {"codec": "int4"})
    journal.append("submitted", run=str(run))
    journal.append("accepted")
    assert attempts(journal) == 1
    for changes in ({"overrides": ["a=3"]}, {"codec": "int8"}):
        with pytest.raises(UserError, match=f"has {next(iter(changes))}="):
            keep_request(here, 1, asked | {"codec": "int4"} | changes)
    keep_request(here, 1, asked | {"codec": "int4", "signing_key": "key"})
    how = {"codec": "int4", "overrides": ["a=1", "facility.walltime_minutes=60"]}
    run.mkdir()
    count = len(journal.records("asked"))
    for _ in range(2):
        keep_request(here, 1, asked | how)
    assert journal.last("asked")["request"]["overrides"] == how["overrides"]
    assert len(journal.records("asked")) == count + 1
    assert attempts(journal) == 0 and run.exists()


def test_a_scheduler_that_refuses_for_a_minute_takes_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it asked without a pause; other words are for it at once. No scheduler, no pause."""
    journal, now, asked = Journal(tmp_path / "round-001"), [1e9], {"attempts": 3}
    asked |= {"facilities_here": 1, "overrides": ["a=1"]}
    run: Any = SimpleNamespace(facility=SimpleNamespace(scheduler="slurm"), ranks_per_node=1)
    monkeypatch.setattr(site.time, "time", lambda: now[0])
    monkeypatch.setattr(site.run_dir, "folder", lambda _: tmp_path / "run")
    no = Finished(1, "", "atoll: Unable to contact slurm controller\nhint")
    monkeypatch.setattr(site, "run_command", lambda _, environment: no)

    def submitted(after_seconds: float) -> str:
        now[0] += after_seconds
        state, why = site._submitted(journal.folder, run, [], asked, "")
        assert "Unable to contact slurm controller" in why
        return state

    journal.append("asked", request=asked)
    assert {submitted(0.1) for _ in range(10)} == {"retry"}
    assert len(journal.records("refused")) == len(journal.records("submitted")) == 1
    for wait_seconds, count in ((100.0, 1), (30.0, 2), (200.0, 2), (50.0, 3)):
        submitted(wait_seconds)
        assert len(journal.records("refused")) == count
    assert submitted(0.1) == "failed"
    asked["attempts"] = 6  # typed again
    journal.append("asked", request=asked)
    assert submitted(0.1) == "retry" and len(journal.records("refused")) == 4
    run.facility.scheduler = "none"
    assert submitted(0.1) == "retry" and len(journal.records("refused")) == 5


def test_what_an_older_campaign_was_begun_without_is_as_by_default(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    kept = settings_to_keep(store)
    rule = kept["rule"]
    del rule["fragments"]
    settings_file(store.folder).write_text(json.dumps(kept))
    with pytest.raises(UserError, match=r"was begun with rule\.fragments=1, now it is 2"):
        settings_to_keep(retyped(store, rule=rule | {"fragments": 2}))
    assert load_store(store.folder).campaign.rule.fragments == 1
    for each in kept["sites"]:
        del each["signing_key"]
        store.record_answer(1, store.site(each["name"]), {"state": "ready"})
    settings_file(store.folder).write_text(json.dumps(kept))
    assert settings_to_keep(store)["sites"][0]["signing_key"] is None


@pytest.mark.parametrize("wrong", [{"sites": 5}, {"sites": [5]}, {"sites": [{}]}, {"rule": []}])
def test_settings_of_another_kind_are_told(tmp_path: Path, wrong: dict[str, Any]) -> None:
    store = store_of(tmp_path)
    kept = settings_to_keep(store) | wrong
    settings_file(store.folder).write_text(json.dumps(kept))
    with pytest.raises(UserError, match="campaign setting"):
        settings_to_keep(store)
