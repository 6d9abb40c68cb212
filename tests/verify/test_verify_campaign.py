"""A campaign's model against its provenance.json: signatures, and every aggregation once more."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proven import (
    A_JOB,
    SITES,
    VOCABULARY,
    flipped,
    materials,
    restated,
    verify,
)

from atoll import run_dir
from atoll.__main__ import main
from atoll.campaign import average as averaging
from atoll.campaign import coordinator
from atoll.campaign.prove import prove_campaign
from atoll.campaign.signing import OF_MODELS, is_known, refuse_unsigned, sign
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.errors import UserError
from atoll.federation import make_delta
from atoll.federation.update_files import refuse_wrong_files
from atoll.proof import crate, statement
from atoll.proof.made_with import in_words, made_with
from atoll.settings import exchange
from atoll.verify import of_campaign

pytestmark = [pytest.mark.login_node, pytest.mark.usefixtures("one_process")]

ENDLESS = b"""{"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "x",
    "digest": {"sha256": "a"}, "annotations": {"bytes": 1e999}}], "predicateType":
    "https://slsa.dev/provenance/v1", "predicate": {"buildDefinition": {"resolvedDependencies": []},
    "runDetails": {"byproducts": []}}}"""


def test_an_untouched_campaign_is_as_stated(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    signers = str(store.campaign.allowed_signers)
    assert verify(store, "--signers", signers) == 0
    output = capsys.readouterr().out
    assert "provenance.json: signed by coordinator" in output
    for number in (1, 2):
        assert f"round {number}: aggregated again, bit for bit (2)" in output
        assert f"round {number}: the update of south (signed, as allowed)" in output
    assert not any(path.name.startswith(".") for path in store.model(2).iterdir())
    text = (store.model(2) / "export" / statement.NAME).read_text()
    assert str(store.folder.parent) not in text and "BEGIN" not in text


def test_one_round_is_aggregated_alone(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(store, "--round", "1") == 0
    output = capsys.readouterr().out
    assert "round 1: aggregated again, bit for bit (2)" in output and "round 2" not in output
    update = an_update(store)
    content = bytearray(update.read_bytes())
    content[-1] ^= 1
    update.write_bytes(content)
    assert verify(store, "--round", "2") == 0
    assert verify(store, "--round", "1") == 2
    assert f"atoll: {update} has changed" in capsys.readouterr().err
    assert verify(store, "--round", "3") == 2
    assert "no round 3 made this model" in capsys.readouterr().err
    assert verify(store, "--round", "1", "--quick") == 2


def test_what_facilities_tell_of_their_jobs_is_in_the_proof(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(store, "--quick") == 0
    assert "nothing was told by south: no Slurm" in capsys.readouterr().out
    export = store.model(2) / "export"
    graph = json.loads((export / statement.CRATE).read_text())["@graph"]
    names = [entity["name"] for entity in graph if str(entity["@id"]).startswith("#job-")]
    assert names.count("job 7 of cl") == 2 and len({x["@id"] for x in graph}) == len(graph)
    text = (export / statement.CARD).read_text()
    assert "| Node-hours, as schedulers count | 2 of 2 jobs |" in text
    assert "| Energy, kWh | 2 of 2 of 2 jobs |" in text


@pytest.mark.parametrize(
    ("state", "ended", "status"),
    [
        ("COMPLETED", 1060.0, "Completed"),
        ("RUNNING", None, "Active"),
        ("COMPLETING", 1060.0, "Active"),
        ("TIMEOUT", 1060.0, "Failed"),
    ],
)
def test_a_job_at_its_last_step_has_not_failed(
    state: str, ended: float | None, status: str
) -> None:
    job = A_JOB | {"state": state, "ended": ended}
    action = crate._job(1, job, "urn:atoll:1", {"@id": "#run/accounting.json"})
    assert action["actionStatus"] == {"@id": f"http://schema.org/{status}ActionStatus"}


def test_who_has_left_and_what_was_deleted_are_no_less_in_the_proof(store: CampaignStore) -> None:
    sites = [site for site in store.campaign.sites if site.name == "south"]
    left = CampaignStore(store.campaign.model_copy(update={"sites": sites}), store.folder)
    prove_campaign(left, 2)
    card = (store.model(2) / "export" / statement.CARD).read_text()
    assert "| Facilities | south, north |" in card and "| Tokens, as facilities count |" in card
    assert "| Node-hours, as schedulers count | 2 of 2 jobs |" in card
    shutil.rmtree(store.update(1, store.site("north")))
    prove_campaign(left, 2)
    card = (store.model(2) / "export" / statement.CARD).read_text()
    assert "| Tokens, as facilities count | not known |" in card.replace("**", "")


def test_what_a_facility_says_of_its_jobs_is_typed() -> None:
    answer = {"state": "ready", "jobs": [{**A_JOB, "account": "who", "user": "me"}]}
    kept = exchange.read_answer(json.dumps(answer), "north")["jobs"]
    assert kept == [A_JOB]
    for wrong in ({"nodes": -1}, {"energy_joules": 10**400}, {"job": 7}, {"ended": 10**12}):
        answer["jobs"] = [A_JOB | wrong]
        with pytest.raises(UserError, match="no answer of `atoll site`"):
            exchange.read_answer(json.dumps(answer), "north")


def test_what_facilities_say_of_their_runs_is_in_the_proof(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(store, "--quick") == 0
    output = capsys.readouterr().out
    said = (
        "image 'atoll.sif', lock 'ab12', sbom 'cd34', image sha256 'ef56', commit '0123abc+', "
        "libraries 'torch 2.13.0'"
    )
    for number in (1, 2):
        assert f"not at hand  round {number}: north says of its run: {said}" in output
        assert f"not at hand  round {number}: south says of its run: nothing" in output
    card = (store.model(2) / "export" / statement.CARD).read_text()
    assert f"| north | {said} |" in card and "| south | not known |" in card
    assert f"| Parameters | {300 * 7 + 65 * 64 + 65 + 1:,} |" in card
    assert "| Architecture | llama |" in card


def test_another_tokenizer_than_a_facility_read_with_is_said(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "north says that it read with another tokenizer.json than this export's"
    (store.model(2) / "export" / "tokenizer.json").write_text("{}")
    prove_campaign(store, 2)
    assert verify(store, "--quick") == 0
    output = capsys.readouterr().out
    assert f"round 1: {said}" in output and "south says that it read" not in output
    (store.model(2) / "export" / "tokenizer.json").write_text(VOCABULARY)
    prove_campaign(store, 2)
    assert verify(store, "--quick") == 0
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[" * 100_000, b"{}", b'{"_type": 1}', ENDLESS,
        b'{"materials": "' + b"x" * (1 << 20) + b'"}',
    ],
    ids=len,
)  # fmt: skip
def test_a_statement_that_is_none_is_a_gap(store: CampaignStore, content: bytes) -> None:
    update = store.update(1, store.site("north"))
    (update / statement.NAME).write_bytes(content)
    assert made_with(update) == {}


@pytest.mark.parametrize("part", ["annotations", "digest"])
@pytest.mark.parametrize("value", [[], "text", 7, None, {"image": 7}, {"image": "a\n\x1b[2J"}])
def test_facts_of_another_kind_are_left_out(store: CampaignStore, part: str, value: Any) -> None:
    file = store.update(1, store.site("north")) / statement.NAME
    content = json.loads(file.read_text())
    content["predicate"]["buildDefinition"]["resolvedDependencies"][0] = {
        "name": "image", part: value
    }  # fmt: skip
    file.write_text(json.dumps(content))
    said = made_with(file.parent)
    assert said.get("image") in (None, "a\\n\\x1b[2J") and "lock" not in said


def test_an_update_without_its_statement_or_with_another_is_refused(store: CampaignStore) -> None:
    north, south = (store.update(1, store.site(name)) for name in SITES)
    manifest = exchange.read_manifest(north)
    refuse_wrong_files(north, manifest)
    shutil.copy(north / statement.NAME, south)
    with pytest.raises(UserError, match="is not in the manifest"):
        refuse_wrong_files(south, exchange.read_manifest(south))
    (north / statement.NAME).unlink()
    with pytest.raises(UserError, match="is missing"):
        refuse_wrong_files(north, manifest)


def test_a_statement_is_short(store: CampaignStore, tmp_path: Path) -> None:
    long = tmp_path / "long.json"
    long.write_bytes(b" " * (exchange.MAX_MANIFEST_BYTES + 1))
    assert make_delta.copied(long, tmp_path) is None
    north = store.update(1, store.site("north"))
    content = json.loads((north / "manifest.json").read_text())
    content["provenance"]["bytes"] = exchange.MAX_MANIFEST_BYTES + 1
    (north / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="a provenance of 1,048,577 bytes"):
        exchange.read_manifest(north)


def test_one_value_cannot_pose_as_several() -> None:
    assert in_words({"image": "a', commit 'b", "lock": "c"}) == "image 'a, commit b', lock 'c'"


def test_nothing_is_read_that_a_manifest_does_not_name(store: CampaignStore) -> None:
    north, south = (store.update(1, store.site(name)) for name in SITES)
    shutil.copy(north / statement.NAME, south)
    assert made_with(north) and made_with(south) == {}


def test_an_update_that_was_left_out_is_no_part_of_the_proof(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be anything: it was never whole, or changed on its way."""
    path = store.model(1) / "manifest.json"
    content = json.loads(path.read_text())
    content["weights"] = {"south": 1.0}
    run_dir.write_whole(path, json.dumps(content | {"unreadable": {"north": "is missing"}}))
    (store.update(1, store.site("north")) / statement.NAME).unlink()
    prove_campaign(store, 2)
    card = (store.model(2) / "export" / statement.CARD).read_text()
    assert "| Tokens, as facilities count | 3,000 |" in card, "of three updates"
    assert verify(store, "--quick") == 0
    assert "not at hand  round 1: north was left out" in capsys.readouterr().out


def an_update(store: CampaignStore) -> Path:
    return next(store.update(1, store.site("south")).glob("*.safetensors"))


def a_run_statement(store: CampaignStore) -> Path:
    return store.update(2, store.site("north")) / statement.NAME


def a_journal(store: CampaignStore) -> Path:
    return store.journal(2).path


def the_settings(store: CampaignStore) -> Path:
    return store.round(2) / "campaign.json"


def an_older_model(store: CampaignStore) -> Path:
    return next((store.model(1) / "master").glob("*.safetensors"))


def the_manifest(store: CampaignStore) -> Path:
    return store.model(1) / "manifest.json"


def the_accounting(store: CampaignStore) -> Path:
    return run_dir.accounting_file(store.round(2))


def the_card(store: CampaignStore) -> Path:
    return store.model(2) / "export" / statement.CARD


def a_weight(store: CampaignStore) -> Path:
    return next((store.model(2) / "export").glob("*.safetensors"))


def a_signature(store: CampaignStore) -> Path:
    return store.update(2, store.site("north")) / "manifest.json.sig"


@pytest.mark.parametrize(
    "which",
    [
        *(an_update, a_journal, the_settings, an_older_model, the_manifest, a_signature),
        *(the_card, a_weight, the_accounting, a_run_statement),
    ],
)
def test_a_changed_byte_of_a_campaign_is_named(
    store: CampaignStore,
    which: Callable[[CampaignStore], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = which(store)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert verify(store) == 2
    assert f"atoll: {path} has changed" in capsys.readouterr().err


def test_a_model_that_its_updates_do_not_make_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever may write the statement, and writes it anew, cannot write the facilities' updates."""
    weights = next((store.model(2) / "export").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    prove_campaign(store, 2)
    assert verify(store) == 2
    assert f"{weights} is not what its updates make" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["", "0", "0, 1", "0, 2", "1, 2"])
def test_a_statement_of_some_rounds_is_no_proof(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    """Whoever leaves rounds out may have put any weights in their place."""
    gone = [f"round-00{n}/global/manifest.json" for n in "012" if n not in left]

    def leave_out(content: dict[str, Any]) -> None:
        kept = [m for m in materials(content) if not m["name"].endswith(tuple(gone))]
        content["predicate"]["buildDefinition"]["resolvedDependencies"] = kept

    restated(store, leave_out)
    for words in ([], ["--quick"]):
        assert verify(store, "--signers", str(store.campaign.allowed_signers), *words) == 2
        assert "provenance.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "modeling_evil.py", "tokenizer.json"])
def test_a_coordinator_that_changes_more_than_weights_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = store.model(2) / "export" / name
    path.write_text('{"model_type": "llama", "rope_theta": 3}')
    prove_campaign(store, 2)
    assert verify(store) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["memory", "delta", "export"])
def test_all_files_of_a_model_are_those_that_its_updates_make(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = next((store.model(1) / name).rglob("*.safetensors"))
    flipped(path)
    assert verify(store) == 2
    assert f"{path} is not what its updates make" in capsys.readouterr().err


def test_the_first_export_has_the_weights_of_the_first_model(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next((store.model(0) / "export").glob("*.safetensors"))
    content = path.read_bytes()
    path.unlink()  # another name of the master's
    path.write_bytes(content)
    flipped(path)
    assert verify(store, "--quick") == 2
    assert str(path) in capsys.readouterr().err
    path.write_bytes(content)
    (store.model(0) / "export" / "config.json").write_text("{}")
    assert verify(store, "--quick") == 2


def test_an_update_that_was_taken_and_not_used_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.journal(2).append("received", facility="south", bytes=1, seconds=0.1)
    shutil.rmtree(store.update(2, store.site("south")))
    shutil.rmtree(store.model(2))
    assert averaging.average(store, 2)
    prove_campaign(store, 2)
    assert verify(store, "--quick") == 2
    assert "was made without south, whose update was taken" in capsys.readouterr().err
    # what comes behind the stated lines is anybody's, and hides nothing
    store.journal(2).append("left out", facility="south", reason="x")
    assert verify(store, "--quick") == 2
    assert "was made without south, whose update was taken" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"event": "received", "facility": "west"}', "{}", "[]"])
def test_lines_behind_those_that_are_stated_change_nothing(store: CampaignStore, line: str) -> None:
    with open(store.journal(1).path, "a") as file:
        file.write(f"{line}\n")
    assert verify(store, "--quick") == 0


def test_a_model_that_was_held_with_updates_enough_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(store.model(2))
    averaging._aggregate(store, 2, [], held="nobody came")
    prove_campaign(store, 2)
    assert verify(store) == 2
    error = capsys.readouterr().err
    assert "was held, and its 2 updates make a model" in error
    for site in SITES:
        shutil.rmtree(store.update(2, store.site(site)))
    prove_campaign(store, 2)
    assert verify(store) == 0
    output = capsys.readouterr().out
    assert "round 2: held, of no update: nobody came" in output and "(0 of 0)" in output


def test_a_statement_that_was_changed_after_it_was_signed_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also where nobody is there to say who may sign."""
    path = shutil.copytree(store.model(2) / "export", tmp_path / "alone") / statement.NAME
    assert main(["verify", str(path.parent)]) == 0
    content = json.loads(path.read_text())
    content["predicate"]["runDetails"]["metadata"]["finishedOn"] = "2020-01-01T00:00:00Z"
    path.write_text(json.dumps(content))
    assert main(["verify", str(path.parent)]) == 2
    assert f"{path} is not what provenance.json.sig signs" in capsys.readouterr().err


def test_a_model_that_is_named_without_its_digest_is_not_stated(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing would be compared of what is then read."""
    export = store.model(2) / "export"
    content = json.loads((export / statement.NAME).read_text())
    for entry in content["predicate"]["buildDefinition"]["resolvedDependencies"]:
        if entry["name"] == "campaign/round-001/global/manifest.json":
            del entry["digest"], entry["annotations"]
    (export / statement.SIGNATURE).unlink()
    (export / statement.NAME).write_text(json.dumps(content))
    assert main(["verify", str(export), "--quick"]) == 2
    assert "states the models of rounds 0, 2: not of each" in capsys.readouterr().err


def test_a_campaign_that_knows_its_coordinator_asks_who_signed(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(store, "--quick") == 0
    assert "provenance.json: signed by coordinator" in capsys.readouterr().out
    sign(store.model(2) / "export" / statement.NAME,
         Path(str(store.campaign.signing_key)).parent / "north", OF_MODELS)  # fmt: skip
    assert verify(store, "--quick") == 2
    assert "is not signed by coordinator" in capsys.readouterr().err


@pytest.mark.parametrize("removed", [False, True], ids=["signed by another", "unsigned"])
def test_a_campaign_that_knows_its_coordinator_asks_where_openssh_is_older(
    store: CampaignStore,
    capsys: pytest.CaptureFixture[str],
    older_openssh: None,
    removed: bool,
) -> None:
    assert verify(store, "--quick") == 0
    assert "provenance.json: signed by coordinator" in capsys.readouterr().out
    path = store.model(2) / "export" / statement.NAME
    sign(path, Path(str(store.campaign.signing_key)).parent / "north", OF_MODELS)
    if removed:
        (path.parent / statement.SIGNATURE).unlink()
    assert verify(store, "--quick") == 2
    error = capsys.readouterr().err
    assert ("is not signed\n" if removed else "is not signed by coordinator") in error


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("coordinator ssh-ed25519 A", True),
        ("north,coord* ssh-ed25519 A", True),
        ('  "our own,coordinator" namespaces="x" ssh-ed25519 A', True),
        ("* ssh-ed25519 A", True),
        ("*,!coordinator ssh-ed25519 A", False),
        ("[a-d]oordinator ssh-ed25519 A", False),
        ("# coordinator ssh-ed25519 A", False),
        ("north ssh-ed25519 coordinator", False),
        ("", False),
    ],
)
def test_the_names_of_allowed_signers_are_those_of_their_lines(
    tmp_path: Path, older_openssh: None, line: str, known: bool
) -> None:
    (tmp_path / "signers").write_text(f"# ours\n\n{line}\n")
    assert is_known("coordinator", tmp_path / "signers") is known
    assert not is_known("coordinator", tmp_path / "nowhere")


def test_a_coordinator_signs_what_it_has_not_signed_yet(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.model(2) / "export" / statement.SIGNATURE).unlink()
    assert verify(store, "--quick") == 2
    assert "is not signed" in capsys.readouterr().err
    assert verify(store, "--quick", "--sign", str(store.campaign.signing_key)) == 0
    assert verify(store, "--quick") == 0


def test_a_part_of_a_model_that_was_not_kept_is_said(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(store.model(1) / "delta")
    assert verify(store) == 0
    said = "round 1: aggregated again, bit for bit (2), but its delta: not kept"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "gone",
    ["round-002/campaign.json", "round-001/journal.jsonl", "round-001/global/manifest.json",
     "round-001/south/update/manifest.json", "round-002/accounting.json"],
)  # fmt: skip
def test_what_is_taken_out_of_a_folder_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], gone: str
) -> None:
    (store.folder / gone).unlink()
    assert verify(store, "--quick") == 2
    assert f"{store.folder / gone} is missing" in capsys.readouterr().err


def test_a_model_that_was_not_kept_is_a_gap(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(store.model(1))
    assert verify(store) == 0
    output = capsys.readouterr().out
    assert "not at hand  round 1: its model" in output
    assert "not at hand  round 2: what its aggregation read" in output


def test_a_file_beside_an_update_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.update(1, store.site("south")) / "more.safetensors"
    path.write_bytes(b"")
    assert verify(store, "--quick") == 2
    assert f"{path} is not in the update's manifest" in capsys.readouterr().err


@pytest.mark.parametrize("annotations", ["q", [], 7])
def test_a_statement_of_other_types_is_none(
    store: CampaignStore, capsys: pytest.CaptureFixture[str], annotations: Any
) -> None:
    restated(store, lambda c: materials(c).append({"name": "x", "annotations": annotations}))
    assert verify(store, "--quick") == 2
    assert "is no statement of Atoll" in capsys.readouterr().err


def test_a_manifest_that_makes_no_sense_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.model(1) / "manifest.json"
    run_dir.write_whole(path, json.dumps({"digest": 3, "rejected": []}))
    prove = json.loads((store.model(2) / "export" / statement.NAME).read_text())
    [entry] = [m for m in materials(prove) if m["name"].endswith("round-001/global/manifest.json")]
    entry["digest"]["sha256"] = run_dir.sha256_of(path)
    entry["annotations"]["bytes"] = path.stat().st_size
    restated(store, lambda content: content.update(prove))
    assert verify(store, "--quick") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_rule_of_fewer_words_is_the_same_rule(store: CampaignStore) -> None:
    path = store.model(1) / "manifest.json"
    content = json.loads(path.read_text())
    del content["rule"]["fragments"]
    run_dir.write_whole(path, json.dumps(content))
    prove_campaign(store, 2)
    assert verify(store) == 0


def test_a_manifest_that_gives_other_weights_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.model(1) / "manifest.json"
    content = json.loads(path.read_text())
    run_dir.write_whole(path, json.dumps(content | {"weights": {"north": 0.9, "south": 0.1}}))
    prove_campaign(store, 2)
    assert verify(store) == 2
    assert "make another model: weights is" in capsys.readouterr().err


def test_an_update_that_another_signed_is_named(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    update = store.update(1, store.site("south"))
    sign(update / "manifest.json", Path(str(store.campaign.allowed_signers)).parent / "north")
    prove_campaign(store, 2)
    assert verify(store) == 2
    assert "is not signed by south" in capsys.readouterr().err


def test_scores_beside_any_model_are_no_part_of_the_proof(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1, 2):
        run_dir.scores_file(store.model(number) / "export").write_text("{}")
    assert verify(store) == 0
    prove_campaign(store, 2)
    for number in (0, 1, 2):
        run_dir.scores_file(store.model(number) / "export").write_text('{"again": 1}')
    assert verify(store) == 0
    assert "not at hand  scores.json: who measured it" in capsys.readouterr().out


def test_scores_that_a_statement_has_are_those_that_are_there(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older Atoll stated them."""
    path = run_dir.scores_file(store.export(2))
    path.write_text("{}")
    stated = statement.described(path.name, 2, run_dir.sha256_of(path))
    restated(store, lambda content: content["subject"].append(stated))
    assert verify(store) == 0
    path.write_text("[]")
    assert verify(store) == 2
    assert f"{path} has changed" in capsys.readouterr().err


def test_updates_that_were_not_kept_are_said_to_be_missing(
    store: CampaignStore, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(store.update(1, store.site("south")))
    assert verify(store) == 0
    output = capsys.readouterr().out
    assert "not at hand  campaign/round-001/south/update/manifest.json" in output
    assert "not at hand  round 1: what its aggregation read" in output
    assert "round 2: aggregated again, bit for bit (2)" in output


def test_the_next_round_does_not_take_over_the_proof(made: CampaignStore, tmp_path: Path) -> None:
    from atoll.federation.global_model import copy_beside_weights

    run_dir.scores_file(made.model(2) / "export").write_text("{}")  # of this model alone
    (tmp_path / "next").mkdir()
    copy_beside_weights(made.model(2) / "export", tmp_path / "next", "float32")
    assert (tmp_path / "next" / "config.json").is_file()
    assert not statement.OWN & {path.name for path in (tmp_path / "next").iterdir()}


def test_what_is_signed_is_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes("ä\r\n\n\r".encode())
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")]
    subprocess.run(argv, check=True)
    sign(tmp_path / "model", tmp_path / "key")
    (tmp_path / "signers").write_text(f"us {(tmp_path / 'key.pub').read_text()}")
    refuse_unsigned(tmp_path / "model", tmp_path / "signers", "us")


def test_a_signature_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("ä\n")
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "a word", "-f", str(tmp_path / "key")]
    subprocess.run(argv, check=True)
    with pytest.raises(UserError, match="cannot be signed"):
        sign(tmp_path / "model", tmp_path / "key")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.pub", "model"]
    (tmp_path / "model.sig").write_text("an older one")
    with pytest.raises(UserError, match="cannot be signed"):
        sign(tmp_path / "model", tmp_path / "key")
    assert (tmp_path / "model.sig").read_text() == "an older one"


def test_what_a_kill_left_of_a_round_that_was_the_last_goes(store: CampaignStore) -> None:
    """The campaign had more rounds then: nobody else would remove it."""
    (store.model(1) / ".merged.partial").mkdir()
    for name in (".merged.yaml", ".merged.lock", "export/.README.md.4711.partial"):
        (store.model(1) / name).write_text("{")
    prove_campaign(store, 2)
    assert verify(store) == 0
    assert not list(store.model(1).rglob(".*"))


def test_a_round_that_was_removed_is_named(
    store: CampaignStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store.export(2), tmp_path / "moved")
    shutil.rmtree(store.round(2))
    assert main(["verify", str(tmp_path / "moved"), "--from", str(store.folder)]) == 2
    assert "round-002/campaign.json is missing" in capsys.readouterr().err


def test_a_file_that_may_not_be_read_is_no_tampering(
    store: CampaignStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "manifest.json")

    monkeypatch.setattr(of_campaign, "_model", refused)
    assert verify(store) == 2
    assert "change its permissions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ([statement.NAME, statement.SIGNATURE], "global/export/.provenance.json.4711.partial"),
        ([statement.SIGNATURE], "global/export/.provenance.json.sig.4711.partial"),
        ([], "global/.export.yaml"),
    ],
)
def test_what_a_kill_left_beside_the_proof_goes(
    store: CampaignStore, written: list[str], left: str
) -> None:
    """A power cut while either was written, or a signal while adapters were merged."""
    for name in written:
        (store.export(2) / name).unlink()
    (store.round(2) / left).write_text("{")
    settings = store.campaign.model_dump(mode="json") | {"last_loss": False}
    assert coordinator.run(CampaignStore(checked_campaign(settings), store.folder)) == 0
    assert not (store.round(2) / left).exists() and verify(store) == 0
    assert Path(left).name not in (store.export(2) / statement.NAME).read_text()


def test_a_kill_before_the_signature_leaves_no_model_unsigned(store: CampaignStore) -> None:
    signature = store.export(2) / statement.SIGNATURE
    signature.unlink()
    settings = store.campaign.model_dump(mode="json") | {"last_loss": False}
    assert coordinator.run(CampaignStore(checked_campaign(settings), store.folder)) == 0
    assert signature.is_file() and verify(store) == 0
