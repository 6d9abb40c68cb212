"""A coordinator that made another model than its facilities' updates, and signed for it."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import made_up
import pytest
from proven import SITES, made_campaign, restated, verify
from safetensors.torch import load_file, save_file

from atoll import run_dir
from atoll.__main__ import main
from atoll.campaign import average as averaging
from atoll.campaign import first_model
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.prove import prove_campaign
from atoll.campaign.signing import sign
from atoll.campaign.store import NONCES, CampaignStore, checked_campaign
from atoll.errors import UserError
from atoll.federation import aggregate
from atoll.models.safetensor_files import INDEX
from atoll.proof.statement import NAME, SIGNATURE, described, read_statement
from atoll.verify import again, command

pytestmark = [pytest.mark.login_node, pytest.mark.usefixtures("one_process")]


def again_from(store: CampaignStore, number: int) -> None:
    """The models from this round on, made anew from what is there, stated and signed."""
    for each in range(number, 3):
        shutil.rmtree(store.model(each))
        assert averaging.average(store, each)
    prove_campaign(store, 2)


def rewritten(path: Path, **changes: Any) -> None:
    run_dir.write_whole(path, json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def patient(tmp_path: Path) -> CampaignStore:
    """A campaign that goes on with one update, or with a late one."""
    rule = {"update": "nesterov", "max_staleness": 1, "quorum": 1}
    return made_campaign(tmp_path, rule=rule)


def own_key(store: CampaignStore, name: str) -> Path:
    return Path(str(store.campaign.allowed_signers)).parent / name


def test_the_first_model_remembers_nothing(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands in a momentum there would be added to every weight, and nobody sent it."""
    memory = store.model(0) / "memory" / "momentum"
    memory.mkdir(parents=True)
    for path in (store.model(1) / "memory" / "momentum").glob("*.safetensors"):
        large = {name: values * 0 + 7.0 for name, values in load_file(path).items()}
        save_file(large, memory / path.name)
    shutil.rmtree(store.model(1))
    assert averaging.average(store, 1)
    prove_campaign(store, 1)
    assert main(["verify", str(store.model(1) / "export")]) == 2
    assert f"{store.model(0) / 'memory'} is no part of a first model" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["a file of its master", "a word of its manifest"])
def test_the_first_model_is_what_its_manifest_says_and_no_more(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    if what == "a file of its master":
        (store.model(0) / "master" / "more.safetensors").write_bytes(b"")
        found = "more.safetensors is no part"
    else:
        rewritten(store.model(0) / "manifest.json", norms_before={"0": [1e-4]})
        found = "norms_before"
    prove_campaign(store, 2)
    assert verify(store, "--quick") == 2
    assert found in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "norms_before",
        "claims",
        "averaged_rounds",
        "changed_rounds",
        "taken",
        "refused",
        "refused_in",
    ],
)
def test_what_later_rounds_go_by_is_made_again(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Who is left out, what late work counts for, and what facilities take."""
    path = store.model(1) / "manifest.json"
    norms = json.loads(path.read_text())["norms_before"]["0"]
    forged = {"norms_before": [norm / 100 for norm in norms], "claims": [1.0]}
    forged |= {"taken": {}, "refused": {"north": 1}, "refused_in": {"north": 1}}
    rewritten(path, **{name: {"0": forged.get(name, 0)}})
    prove_campaign(store, 2)
    assert verify(store) == 2
    assert f"{store.model(1)}: the updates of round 1 make another" in capsys.readouterr().err


def test_what_late_work_counts_for_is_the_same_to_the_last_digit(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.model(1) / "manifest.json"
    claims = json.loads(path.read_text())["claims"]
    forged = {of: [claim * (1 + 1e-6) for claim in each] for of, each in claims.items()}
    assert forged != claims
    rewritten(path, claims=forged)
    prove_campaign(store, 2)
    assert verify(store) == 2
    assert "make another model: claims is" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["master", "delta"])
@pytest.mark.parametrize("name", ["README.md", "provenance.json"])
def test_a_file_by_the_name_of_a_proof_s_is_named_where_none_is(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], part: str, name: str
) -> None:
    path = store.model(2) / part / name
    path.write_text("{}")
    assert verify(store) == 2
    assert f"{path} is nothing that its updates make" in capsys.readouterr().err


def test_the_list_of_updates_that_were_taken_is_stated(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    nonces = store.folder / NONCES
    run_dir.append_record(nonces, {"nonce": "a", "round": 1})
    losses = store.round(1) / "losses" / "journal.jsonl"
    losses.parent.mkdir()
    run_dir.append_record(losses, {"event": "began"})
    prove_campaign(store, 2)
    run_dir.append_record(nonces, {"nonce": "b", "round": 3})  # as the campaign goes on
    assert verify(store, "--quick") == 0
    for path in (losses, nonces):
        content = path.read_text()
        path.write_text(content.replace("a", "z", 1))
        assert verify(store, "--quick") == 2
        assert f"{path} has changed" in capsys.readouterr().err
        path.write_text(content)


@pytest.mark.parametrize("claim", [{"campaign": "of-last-year"}, {"round": 7}, {"round": 1}])
def test_an_update_for_another_campaign_or_round_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], claim: dict[str, Any]
) -> None:
    """Each facility signed it, for something else."""
    manifest = store.update(2, store.site("north")) / "manifest.json"
    rewritten(manifest, **claim)
    sign(manifest, own_key(store, "north"))
    again_from(store, 2)
    for words in ([], ["--quick"]):
        assert verify(store, *words) == 2
        [(name, value)] = claim.items()
        assert f"{manifest} is of {name} {value}" in capsys.readouterr().err


def test_an_update_that_is_counted_twice_is_named(
    patient: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (patient.update(number, patient.site("north")) for number in (1, 2))
    shutil.rmtree(second)
    shutil.copytree(first, second)
    again_from(patient, 2)
    assert verify(patient, "--quick") == 2
    assert f"{second / 'manifest.json'} was counted in round 1 already" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["unreadable", "rejected"])
def test_an_update_that_is_called_wrong_and_gone_is_a_gap(
    patient: CampaignStore, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    shutil.rmtree(patient.update(2, patient.site("south")))
    again_from(patient, 2)
    rewritten(patient.model(2) / "manifest.json", **{how: {"south": "x"}})
    prove_campaign(patient, 2)
    assert verify(patient) == 0
    output = capsys.readouterr().out
    assert "not at hand  round 2: the update of south, which was left out (x)" in output
    assert "not at hand  round 2: what its aggregation read" in output


def test_an_update_that_is_whole_and_called_unreadable_is_named(
    patient: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    south, aside = patient.update(2, patient.site("south")), patient.folder / "aside"
    south.rename(aside)
    again_from(patient, 2)
    aside.rename(south)
    rewritten(patient.model(2) / "manifest.json", unreadable={"south": "x"})
    prove_campaign(patient, 2)
    assert verify(patient) == 2
    assert "make another model" in capsys.readouterr().err


def test_a_round_that_was_held_without_the_updates_that_came_is_a_gap(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in SITES:
        store.journal(2).append("received", facility=name, bytes=1, seconds=0.1)
        shutil.rmtree(store.update(2, store.site(name)))
    shutil.rmtree(store.model(2))
    averaging._aggregate(store, 2, [], held="nobody came")
    prove_campaign(store, 2)
    assert verify(store) == 0
    output = capsys.readouterr().out
    assert "not at hand  round 2: whether it had to be held: north, south" in output
    assert "as stated    round 2: held" not in output


@pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_x.py", "z.safetensors"])
def test_a_file_added_to_the_first_export_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = store.model(0) / "export" / name
    path.write_bytes(b"")
    assert verify(store, "--quick") == 2
    assert f"{path} is no part of a first model" in capsys.readouterr().err


def test_an_export_that_lies_at_the_top_has_no_campaign(store: CampaignStore) -> None:
    """As where it is mounted at /model."""
    statement = read_statement(store.model(2) / "export")
    assert command._source(Path("/atoll-model"), statement, is_campaign=True) is None


def test_an_export_by_another_name_has_its_campaign(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    link = tmp_path / "newest"
    link.symlink_to(store.model(2) / "export")
    for path in (link, store.model(2) / "export" / ".." / "export"):
        assert main(["verify", str(path), "--quick"]) == 0
        output = capsys.readouterr().out
        assert "signed by coordinator" in output and "round 2: its model" in output


def test_an_export_beside_the_rounds_is_compared_with_them(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    latest, copied = store.folder / "latest", store.folder / "final"
    latest.symlink_to("round-002/global/export")
    shutil.copytree(store.export(2), copied)
    for words in ([str(latest)], [str(copied), "--from", str(store.folder)]):
        assert main(["verify", *words, "--quick"]) == 0
        assert "round 2: its model" in capsys.readouterr().out


def test_a_link_to_another_round_s_place_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store.export(2), export := store.folder / "round-003" / "global" / "export")
    (latest := store.folder / "latest").symlink_to(export)
    for path in (export, latest):
        assert main(["verify", str(path), "--quick"]) == 2
        assert "tells of the rounds up to 2, not of its own" in capsys.readouterr().err


def test_an_export_whose_files_are_links_is_one(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As a hub's cache has them, by other names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(sorted(store.export(2).iterdir())):
        shutil.copy(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(blobs / f"{number:064x}")
    signers = ["--signers", str(store.campaign.allowed_signers)]
    for words in ([], signers, ["--from", str(store.folder), "--quick"]):
        assert main(["verify", str(snapshot), *words]) == 0
    assert "signed by coordinator" in capsys.readouterr().out
    with open((snapshot / NAME).resolve(), "a") as file:
        file.write(" ")
    for words in ([], signers):
        assert main(["verify", str(snapshot), *words]) == 2
        assert "provenance.json" in capsys.readouterr().err


def test_a_model_stays_as_stated_while_its_campaign_goes_on(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    values = store.campaign.model_dump(mode="json") | {"rounds": 3, "deadline_minutes": 99.0}
    longer = keep_settings(CampaignStore(checked_campaign(values), store.folder))
    assert verify(longer) == 0
    into = longer.update(3, longer.site("north"))
    into.parent.mkdir(parents=True)
    made = made_up.update(
        store.folder / "scratch", longer.model(2), "north", made_up.weights(9, 1e-3), "int8",
        round=3,
    )  # fmt: skip
    sign(made.folder / "manifest.json", own_key(store, "north"))
    made.folder.rename(into)
    longer.journal(3).append("began")
    assert averaging.average(longer, 3)
    prove_campaign(longer, 3)
    assert verify(store) == 0
    assert main(["verify", str(longer.model(3) / "export")]) == 0
    assert "round 3: aggregated again" in capsys.readouterr().out


def test_a_folder_that_cannot_be_listed_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows a name in it may still open that file; to root every folder is open."""
    hidden, usual = store.model(2) / "export" / "custom_generate", os.scandir
    hidden.mkdir()

    def scandir(path: str) -> Any:
        if path == str(hidden):
            raise PermissionError(13, "Permission denied", path)
        return usual(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert verify(store, "--quick") == 2
    assert f"{hidden} cannot be listed: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_campaign_that_is_called_a_run_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], is_signed: bool
) -> None:
    """As a run it would have neither signers nor rounds to be compared."""

    def called_a_run(content: dict[str, Any]) -> None:
        content["predicate"]["buildDefinition"] |= {
            "buildType": "urn:atoll:run:1",
            "resolvedDependencies": [],
        }
        content["predicate"]["runDetails"]["byproducts"] = []

    restated(store, called_a_run)
    if not is_signed:
        (store.model(2) / "export" / SIGNATURE).unlink()
    assert verify(store) == 2
    assert "is the statement of a run, and it lies in the folder of a campaign" in (
        capsys.readouterr().err
    )


def with_older_names(store: CampaignStore) -> tuple[dict[str, Any], dict[str, Any]]:
    """The campaign anew, from a first model whose files have what an older Atoll left behind."""
    export = store.model(0) / "export"
    rewritten(export / "config.json", torch_dtype="float32")
    index = {"metadata": {"total_size": 7}, "weight_map": {}}
    (export / INDEX).write_text(json.dumps(index))
    again_from(store, 1)
    return json.loads((store.export(2) / "config.json").read_text()), index


def test_an_older_export_that_kept_its_number_format_is_as_stated(store: CampaignStore) -> None:
    config, index = with_older_names(store)
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert verify(store) == 0
    for number in (1, 2):
        path = store.export(number) / "config.json"
        path.write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=1))
        (store.export(number) / INDEX).write_text(json.dumps(index))
    prove_campaign(store, 2)
    assert verify(store) == 0


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_an_export_with_another_number_format_than_it_had_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with_older_names(store)
    path = store.export(2) / name
    forged = {"torch_dtype": "float16"} if name == "config.json" else {"metadata": {}}
    path.write_text(json.dumps(json.loads(path.read_text()) | forged, indent=1))
    prove_campaign(store, 2)
    assert verify(store) == 2
    assert f"{path} is not what its updates make" in capsys.readouterr().err


@pytest.mark.parametrize("zero", ["00", "\N{ARABIC-INDIC DIGIT ZERO}"])
def test_rounds_by_other_names_are_none(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], zero: str
) -> None:
    """Files that nobody has would be no more than not at hand."""
    names = [f"campaign/round-{zero}0{number}/global/manifest.json" for number in range(3)]
    models = [described(name, 1, "ab" * 32) for name in names]

    def renamed(content: dict[str, Any]) -> None:
        content["predicate"]["buildDefinition"]["resolvedDependencies"] = models

    restated(store, renamed)
    assert verify(store, "--quick") == 2
    assert "states the models of rounds none" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["a pipe", "endless", "nested"])
@pytest.mark.parametrize("place", ["", "round-002"])
def test_settings_that_no_campaign_has_are_not_waited_for(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], place: str, how: str
) -> None:
    path = store.folder / place / "campaign.json"
    path.unlink()
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 100_000)
    assert verify(store, "--quick") == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("named", ["~nobody-of-this-name/signers", "a" * 5000])
def test_signers_of_somebody_elsewhere_are_nobodys(
    made: CampaignStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    """The campaign was made on another machine, whose users are not here."""
    folder = shutil.copytree(made.folder, tmp_path / "c")
    values = made.campaign.model_dump(mode="json") | {"allowed_signers": named}
    store = CampaignStore(checked_campaign(values), folder)
    rewritten(folder / "campaign.json", allowed_signers=named)
    prove_campaign(store, 2)
    assert verify(store, "--quick") == 0
    assert "nobody's key is known" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["evil.py", "x.safetensors"])
def test_a_file_beside_the_folders_of_a_model_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = store.model(1) / name
    path.write_bytes(b"")
    assert verify(store) == 2
    assert f"{path} is nothing that its updates make" in capsys.readouterr().err


def of_adapters(store: CampaignStore, *start: str) -> CampaignStore:
    """The same campaign, as if adapters were what it trains."""
    rewritten(store.model(0) / "manifest.json", frozen="ab" * 32)
    words = ["facility=laptop", "data=python_stdlib", "model=llama_tiny", *start]
    values = store.campaign.model_dump(mode="json") | {"lora": {"rank": 2}, "start": words}
    return CampaignStore(checked_campaign(values), store.folder)


def test_what_a_campaign_names_is_never_run(
    store: CampaignStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of its own would say of any merge that it is the one."""
    run: list[list[str]] = []

    def noted(argv: list[str], what: str) -> str:
        run.append(argv)
        return json.dumps({"digest": "ab" * 32})

    monkeypatch.setattr(first_model, "run_atoll", noted)
    monkeypatch.setattr(first_model, "_shown", noted)
    theirs = of_adapters(store, f"image.file={tmp_path}/evil.sif", "image.run_flags=[--bind,/]")
    assert not list(again._merged(theirs, 2, tmp_path))
    assert [argv[: len(again.HERE)] for argv in run] == [again.HERE] * 2
    assert "HF_HUB_OFFLINE=1" in again.HERE and not any("apptainer" in argv for argv in run)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"transformers_version": "4.57.1"}, True),
        ({"transformers_version": ["4"]}, False),
        ({"transformers_version": "5.0.0", "rope_theta": 3}, False),
        ({"transformers_version": "4.57.1", "rope_theta": 2.0}, False),
        ({"more": 1}, False),
    ],
)
def test_what_was_merged_with_another_transformers_differs_by_its_version_alone(
    tmp_path: Path, changes: dict[str, Any], is_same: bool
) -> None:
    config = {"model_type": "llama", "transformers_version": "5.0.0", "rope_theta": 2}
    for name, more in (("made", {}), ("merged", changes)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | more, indent=2))
    with nullcontext() if is_same else pytest.raises(UserError, match="is not what its updates"):
        again._refuse_other_files(tmp_path / "made", tmp_path / "merged", set())


def test_a_base_that_is_elsewhere_is_a_gap_and_another_one_is_not(
    store: CampaignStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(argv: list[str], what: str) -> str:
        raise UserError("the base's digest cannot be made: no such folder", "get it")

    monkeypatch.setattr(first_model, "run_atoll", gone)
    [line] = again._merged(of_adapters(store), 2, tmp_path)
    assert line.state == "not at hand" and "no such folder" in line.what
    [line] = again._merged(of_adapters(store, "data=of_its_own_clone"), 2, tmp_path)
    assert line.state == "not at hand" and "of_its_own_clone" in line.what
    monkeypatch.setattr(first_model, "run_atoll", lambda argv, what: '{"digest": "cd"}')
    theirs = of_adapters(store)
    with pytest.raises(UserError, match="the campaign began with abababab"):
        list(again._merged(theirs, 2, tmp_path))
    shutil.rmtree(theirs.model(0))  # removed as a folder
    [line] = again._merged(theirs, 2, tmp_path)
    assert line.state == "not at hand" and "the first model" in line.what


def test_the_first_model_has_the_digest_that_updates_began_with(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else other weights could stand under it: what facilities signed is only that digest."""
    manifest = store.model(0) / "manifest.json"
    digests = {}
    for path in sorted((store.model(0) / "master").glob("*.safetensors")):
        shifted = {name: values + 0.5 for name, values in load_file(path).items()}
        path.unlink()
        (store.model(0) / "export" / path.name).unlink()
        save_file(shifted, path)
        os.link(path, store.model(0) / "export" / path.name)
        digests[path.name] = run_dir.sha256_of(path)
    rewritten(manifest, master=digests)
    shutil.rmtree(store.model(1))
    assert averaging.average(store, 1)
    prove_campaign(store, 1)
    for words in ([], ["--quick"]):
        assert main(["verify", str(store.model(1) / "export"), *words]) == 2
        assert f"{manifest} says digest" in capsys.readouterr().err


def test_a_round_that_forgot_what_the_server_knew_is_a_gap(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older Atoll made it: it did not look whether the memory was there."""
    shutil.rmtree(store.model(1) / "memory")
    with monkeypatch.context() as patch:
        patch.setattr(aggregate, "refuse_forgotten", lambda *_: None)
        again_from(store, 2)
    assert verify(store) == 0
    output = capsys.readouterr().out
    assert "not at hand  round 2: what its aggregation read" in output
    assert "round 2: aggregated again" not in output


def test_a_campaign_of_before_fragments_is_as_stated(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [store.model(number) / "manifest.json" for number in (1, 2)]
    for path in paths:
        rewritten(path, norms_before=json.loads(path.read_text())["norms_before"]["0"])
    prove_campaign(store, 2)
    assert verify(store) == 0
    assert "its norms_before" not in capsys.readouterr().out
    for path in paths:
        content = json.loads(path.read_text())
        del content["norms_before"]
        run_dir.write_whole(path, json.dumps(content))
    prove_campaign(store, 2)
    assert verify(store) == 0
    assert "not at hand  round 2: its norms_before" in capsys.readouterr().out


def test_a_round_on_another_disk_and_a_first_export_that_is_gone(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.rmtree(store.model(0) / "export")
    store.round(2).rename(tmp_path / "elsewhere")
    store.round(2).symlink_to(tmp_path / "elsewhere")
    assert verify(store) == 0
    assert "round 2: aggregated again, bit for bit" in capsys.readouterr().out


def test_an_update_that_is_gone_is_named_without_aggregating(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(store.update(2, store.site("south")))
    assert verify(store, "--quick") == 0
    assert "not at hand  round 2: the update of south" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "{", "[" * 900, '{"transformers_version": []}'])
def test_a_configuration_that_is_none_is_of_no_other_version(tmp_path, text):
    made, stated = tmp_path / "made" / again.CONFIG, tmp_path / "stated" / again.CONFIG
    for file, content in ((made, '{"transformers_version": "5.23.0"}'), (stated, text)):
        file.parent.mkdir()
        file.write_text(content)
    assert not again._is_of_other_version(made, stated, None)


@pytest.mark.parametrize(
    ("stated", "is_same"),
    [
        ({"eos_token_id": 2, "top_p": 0.9}, True),
        ({"eos_token_id": [2], "top_p": 0.9}, True),
        ({"top_p": 0.9}, True),
        ({"eos_token_id": [2, 5], "top_p": 0.9}, False),
        ({"eos_token_id": 2, "top_p": 0.8}, False),
        ({"eos_token_id": 2}, False),
        ([], False),
        (None, False),
    ],
)
def test_an_older_merge_says_less_of_where_an_answer_ends(
    tmp_path: Path, stated: Any, is_same: bool
) -> None:
    made, other = tmp_path / "made", tmp_path / "stated"
    name = "generation_config.json"
    run_dir.write_whole(made / name, json.dumps({"eos_token_id": [2, 7], "top_p": 0.9}))
    other.mkdir()
    if stated is not None:
        run_dir.write_whole(other / name, json.dumps(stated))
    assert again._is_of_other_version(made / name, other / name, None) is is_same
