"""Which folders and files a coordinator may name at a facility, whatever words it names them by."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll import run_dir
from atoll.campaign import site
from atoll.campaign.allow import allowed_at, refuse_folder, refuse_outside, refuse_settings
from atoll.config.bundle import made_for
from atoll.config.compose import compose
from atoll.errors import UserError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ssh begins; a campaign's folder is in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "camp").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("word", ["data=python_stdlib", "data=hub data.hub=owner/name"])
def test_validation_files_lie_in_the_folder_whatever_the_source(home: Path, word: str) -> None:
    words = ["facility=laptop", *word.split(), "data.validation.fraction=null"]
    words.append("data.validation.files=[private/diary.txt]")
    run = compose([*words, "model=llama_tiny"]).run
    with pytest.raises(UserError, match="outside"):
        refuse_outside(run, words, home / "camp")
    refuse_outside(run, words, home)


def test_files_that_a_bundle_was_made_of_are_read_by_nobody_here(home: Path) -> None:
    """They are named as where it was made; the bundle's own place is asked about as ever."""
    (home / "coord").mkdir()
    words = ["facility=laptop", "data=chat_files", "model=from_path", "model.source=hub/model"]
    own = [*words, "data.files=[texts/x.jsonl]", f"data.validation.files=[{home}/coord/y.jsonl]"]
    own.append("data.validation.fraction=null")
    made = compose(own)
    bundle = home / "camp" / "bundle"
    run_dir.write_whole(run_dir.bundle_request(bundle), made.as_yaml())
    manifest = {"made_for": made_for(made.run), "files": {}}
    run_dir.write_whole(run_dir.bundle_manifest(bundle), json.dumps(manifest))
    refuse_outside(compose([*own, f"folders.bundle={bundle}"]).run, own, home / "camp")
    with pytest.raises(UserError, match="does not let a request name"):
        refuse_outside(made.run, own, home / "camp")
    with pytest.raises(UserError, match=r"does not let a request change folders\.bundle"):
        refuse_settings([f"folders.bundle={home}/other/bundle"], home / "camp")


@pytest.mark.parametrize("folder", [".", "..", "keys", "~"])
def test_no_campaign_has_a_folder_with_more_in_it(home: Path, folder: str) -> None:
    (home / "keys" / ".ssh").mkdir(parents=True)
    with pytest.raises(UserError, match="holds more than a campaign") as error:
        refuse_folder(Path(folder))
    assert "folder=" in error.value.hint and "site.allow" in error.value.hint
    refuse_folder(Path("camp"))
    refuse_folder(Path("new/folder"))


def test_no_campaign_has_a_folder_that_was_there_for_something_else(home: Path) -> None:
    """Else a coordinator names whatever it wants to read, or to sign with."""
    for name in ("research", "listed", "new"):
        (home / name).mkdir()
    for name in ("research", "listed"):
        (home / name / "patients.txt").touch()
    for name in ("base", "prepared", "tokenizer"):
        (home / "new" / name).mkdir()
    for name in (".lock", ".campaign.json.77.partial"):
        (home / "new" / name).touch()  # a kill came before the first request was kept
    with pytest.raises(UserError, match=r"research holds patients\.txt and no campaign") as error:
        refuse_folder(Path("research"))
    assert f"a line 'default' in {home / 'research' / 'site.allow'}" in error.value.hint
    refuse_folder(Path("new"))
    (home / "research" / "site.allow").write_text("default\n")  # its owner says what for
    refuse_folder(Path("research"))
    own = home / ".config" / "atoll" / "site.allow"
    own.parent.mkdir(parents=True)
    own.write_text("default\nfolder=listed\n")
    refuse_folder(Path("listed"))


def test_a_facility_lists_the_folders_of_campaigns(home: Path) -> None:
    own = home / ".config" / "atoll" / "site.allow"
    own.parent.mkdir(parents=True)
    own.write_text("default\nfolder=~/camp\n")
    refuse_folder(Path("camp"))
    refuse_folder(Path("camp/inner"))
    for folder in ("other", ".", "camp/../other"):
        with pytest.raises(UserError, match="let a campaign have the folder") as error:
            refuse_folder(Path(folder))
        assert str(own) in error.value.hint


def test_a_list_holds_for_folders_within(home: Path) -> None:
    """Else a coordinator would name one that has no list yet."""
    (home / "camp" / "site.allow").write_text("training.*\n")
    assert allowed_at(home / "camp" / "inner") == ["training.*"]
    with pytest.raises(UserError, match="does not let a request change nodes"):
        refuse_settings(["nodes=2"], home / "camp" / "inner")


@pytest.mark.parametrize("folder", ["camp/incoming/x/../../../camp", "other/../camp"])
def test_a_request_is_judged_by_the_list_of_the_folder_it_is_about(
    home: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a coordinator writes its name: what it sent, or another campaign's, is no list."""
    for place in ("camp/incoming/x", "other"):
        (home / place).mkdir(parents=True)
        (home / place / "site.allow").write_text("*\n")
    (home / "camp" / "site.allow").write_text("default\n")
    judged: list[Path] = []
    monkeypatch.setattr(site, "advance", lambda folder, *_: judged.append(folder) or {"state": "x"})
    site.main([folder, "1"])
    assert judged == [home / "camp"] and allowed_at(judged[0]) == ["default"]


@pytest.mark.parametrize("folder", ["camp/incoming/x", "new/incoming"])
def test_where_models_come_to_is_no_folder_of_a_campaign(home: Path, folder: str) -> None:
    (home / folder).mkdir(parents=True)
    (home / folder / "site.allow").write_text("*\n")
    with pytest.raises(UserError, match="where models come to") as error:
        refuse_folder(Path(folder))
    own = home / ".config" / "atoll" / "site.allow"
    assert str(own) in error.value.hint
    own.parent.mkdir(parents=True)
    own.write_text(f"default\nfolder={folder}\n")
    refuse_folder(Path(folder))


@pytest.mark.parametrize(("until", "poll_seconds"), [(1e18, 0.0), (1e18, 1e18), (1010.0, 3600.0)])
def test_a_question_neither_hurries_nor_outlives_who_asks(
    home: Path, until: float, poll_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        assert len(slept) < 10**5
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(site, "advance", lambda *_: {"state": "running"})
    monkeypatch.setattr(site, "time", SimpleNamespace(time=lambda: now[0], sleep=sleep))
    how = Namespace(until=until, poll_seconds=poll_seconds)
    assert site.wait(home / "camp", 1, how) == {"state": "running"}
    assert now[0] <= 1001.0 + min(until - 1000.0, site.MOST_WAIT_SECONDS)
    assert min(slept) >= site.LEAST_POLL_SECONDS


def test_nothing_is_written_into_a_folder_that_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {
        "campaign": "c", "round": 1, "facility": "north", "base": "0" * 64, "global_round": 0,
        "codec": "int8", "attempts": 1, "overrides": ["facility=laptop"],
    }  # fmt: skip
    with pytest.raises(UserError, match="holds more than a campaign"):
        site.main([".", "1", "--request", json.dumps(request)])
    assert not any((home / name).exists() for name in ("campaign.json", "rounds"))


@pytest.mark.parametrize("folder", [".ssh", ".ssh/x", ".config/atoll", "camp/bases/round-001"])
def test_nor_one_of_keys_and_settings_nor_within_another_campaign(home: Path, folder: str) -> None:
    """What came into a campaign's folder could be the list of one within."""
    (home / "camp" / "campaign.json").write_text('{"name": "c"}')
    refuse_folder(Path("camp"))
    with pytest.raises(UserError, match="holds more than a campaign"):
        refuse_folder(Path(folder))
