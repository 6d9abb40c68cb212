"""A run's export against its provenance.json: every kind of change is named."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import small_run
from rank_pool import RankPool

from atoll import run_dir
from atoll.__main__ import main
from atoll.cluster.start import write_run_folder
from atoll.config.compose import Composition
from atoll.images.digest import keep_image
from atoll.proof import card, of_run, statement
from atoll.settings import dumped, load_run

ENDED_JOB = "123|cl|gpu|2|60|1000|1010|1070|7200000|COMPLETED|0:0\n"
RUNNING_JOB = "123|cl|gpu|2|60|1000|1010|Unknown||RUNNING|0:0\n"
CANCELLED_JOB = "123|cl|gpu|2|60|1000|1010|1070||CANCELLED by 1000|0:15\n"


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    small_run.write_text(folder)
    own = {"folders__prepared": str(folder / "prepared"), "training__steps": 2}
    run = small_run.settings(folder, 2, name="proof", **own)
    run_folder = small_run.ready(run)
    run_dir.jobs_file(run_folder).write_text("slurm 123\n")
    ranks.run(small_run.train_here, run, world=2)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run; its run.yaml says where its tokens are."""
    shutil.copytree(trained / "runs" / "proof", tmp_path / "proof")
    return tmp_path / "proof"


@pytest.fixture
def complete(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run as made in an image, its job ended and its accounting kept."""
    sbom = tmp_path / "image.cdx.json"
    sbom.write_text('{"bomFormat": "CycloneDX"}')
    monkeypatch.setattr(of_run, "SBOM", sbom)
    run_dir.write_whole(run_dir.image_file(folder), json.dumps({"file": "x", "sha256": "ab" * 32}))
    run = load_run(run_dir.settings_file(folder))
    of_run.prove_run(run_dir.export(folder), run, folder, {"libraries": "torch 1"}, {})
    sacct(tmp_path / "bin", monkeypatch, ENDED_JOB)
    assert main(["status", str(folder)]) == 0
    return folder


def test_a_clone_that_nobody_installed_proves_its_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    run = load_run(run_dir.settings_file(folder))
    monkeypatch.setattr(metadata, "version", unknown)
    of_run.prove_run(run_dir.export(folder), run, folder, {"libraries": "torch 1"}, {})
    assert main(["verify", str(run_dir.export(folder))]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("atoll unknown\n")


def sacct(programs: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A sacct that says this, before every other on PATH."""
    programs.mkdir(exist_ok=True)
    (programs / "sacct").write_text(f"#!/bin/sh\ncat <<'END'\n{answer}END\n")
    (programs / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def verify(run_folder: Path, *words: str) -> int:
    return main(["verify", str(run_dir.export(run_folder)), *words])


def change_byte(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.login_node
def test_an_untouched_export_is_as_stated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder) == 0
    output = capsys.readouterr().out
    for word in ("export: ", "run: ", "prepared: ", "run/checkpoints/step-00000002: ", "tokens: "):
        assert f"as stated    {word}" in output
    assert "not at hand  image: said to be image none" in output
    assert "who wrote provenance.json: it is unsigned" in output
    text = (run_dir.export(folder) / statement.NAME).read_text()
    assert "run/jobs.txt" in text and "run/metrics.jsonl" in text and "gitCommit" in text
    assert str(folder.parent) not in text and "/tmp" not in text
    # what comes later in a log is no change of what was there
    run_dir.append_record(run_dir.metrics_file(folder), {"event": "later"})
    assert verify(folder) == 0


@pytest.mark.login_node
def test_what_a_run_began_with_is_said_and_what_dpo_is_held_against_is_stated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(run_dir.settings_file(folder))
    model = run.model.model_copy(update={"source": "/scratch/me/llama", "revision": "abc"})
    began = run.checkpoint.model_copy(update={"initial_load_path": Path("/x/step-00000007")})
    changed = run.model_copy(update={"model": model, "checkpoint": began})
    reference = run_dir.reference_file(folder)
    reference.write_bytes(b"numbers")
    of_run.prove_run(run_dir.export(folder), changed, folder, {"libraries": "torch 1"}, {})
    assert verify(folder) == 0
    said = "base: said to be model me/llama, revision abc, checkpoint x/step-00000007"
    assert f"not at hand  {said}" in capsys.readouterr().out
    change_byte(reference)
    assert verify(folder) == 2
    assert f"{reference} has changed" in capsys.readouterr().err


def test_the_crate_is_one_graph_that_names_every_file(trained: Path) -> None:
    """What the public validator asks of a Process Run Crate (docs/provenance.md)."""
    export = trained / "runs" / "proof" / "export"
    graph = json.loads((export / statement.CRATE).read_text())["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    assert len(entities) == len(graph)

    def referred(value: object) -> list[str]:
        if isinstance(value, list):
            return [name for item in value for name in referred(item)]
        return [value["@id"]] if isinstance(value, dict) else []

    referenced = {name for entity in graph for value in entity.values() for name in referred(value)}
    outside = {"https://w3id.org/ro/crate/1.1", "http://schema.org/CompletedActionStatus"}
    assert referenced - outside <= entities.keys()
    root, action = entities["./"], entities["#action"]
    assert all(root[name] for name in ("name", "description", "datePublished", "license"))
    assert entities[root["conformsTo"]["@id"]]["version"] == "0.5"
    assert entities[action["instrument"]["@id"]]["@type"] == "SoftwareApplication"
    made = {path.name for path in export.iterdir()} - {statement.NAME, statement.CRATE}
    assert {entity["@id"] for entity in action["result"]} == made
    assert {"#run/run.yaml", "#prepared/manifest.json"} <= {x["@id"] for x in action["object"]}
    assert action["startTime"] <= action["endTime"]


def test_the_card_says_what_is_known_and_names_the_rest(trained: Path) -> None:
    text = (trained / "runs" / "proof" / "export" / statement.CARD).read_text()
    assert "| Architecture | llama |" in text
    for line in ("| Parameters | 37,792 |", "| Steps | 2 |", "| Energy, kWh | not known |"):
        assert line in text
    assert "- Hardware and energy: Energy, kWh" in text and "- License" in text
    assert str(trained) not in text


def test_no_path_of_the_machine_is_in_a_card(tmp_path: Path) -> None:
    small_run.write_text(tmp_path)
    source = tmp_path / "source"
    changes = {"model__source": str(source), "tokenizer__path": str(source)}
    run = small_run.settings(tmp_path, 1, **changes)
    made_of = {"image": "none", "libraries": "torch 1", "tokenizer": f"{source} 0123abcd"}
    text = card.run_card(run, {}, [], {}, made_of)
    assert str(tmp_path) not in text and "| tokenizer | 0123abcd |" in text
    assert "| Begun from | a local folder |" in text and "- Training: Tokens" in text


def test_a_card_names_a_data_set_in_a_folder_by_that_folder_alone(tmp_path: Path) -> None:
    small_run.write_text(tmp_path)
    sources = [{"name": "web", "hub": "a/b"}, {"name": "own", "hub": str(tmp_path / "chats")}]
    run = small_run.settings(tmp_path, 1, data__files=[], data__sources=sources)
    text = card.run_card(run, {}, [], {}, {})
    assert str(tmp_path) not in text and 'datasets: ["a/b"]' in text
    assert "| web: Source | a/b |" in text and "| own: Source | the folder chats |" in text


def test_a_card_is_written_after_a_fault_that_knows_no_step(tmp_path: Path) -> None:
    """As of a node that is gone: no export would come of the run any more."""
    small_run.write_text(tmp_path)
    train = {"event": "train", "step": 7, "tokens": 1, "time": 1.0}
    fault = {"event": "fault", "step": None, "time": 2.0}
    text = card.run_card(small_run.settings(tmp_path, 1), {}, [train, fault], {}, {})
    assert "| Hours, with pauses | 0.000278 |" in text


def test_the_card_of_an_adapter_alone_says_no_merge(tmp_path: Path) -> None:
    small_run.write_text(tmp_path)
    lora = {"model__lora": {"rank": 8, "alpha": 16}, "export__merged": False}
    text = card.run_card(small_run.settings(tmp_path, 1, **lora), {}, [], {}, {})
    assert "| LoRA, alone, for the model above | rank 8 |" in text
    assert "merged" not in text and "| Numbers |" not in text and '"peft"' in text


@pytest.mark.login_node
def test_the_average_of_weights_has_its_own_loss_and_its_own_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last, average = run_dir.export(folder), run_dir.averaged_export(folder)
    result = run_dir.result_file(folder)
    run_dir.write_whole(result, json.dumps({"steps": 2, "loss": 3.25, "ema": {"loss": 2.125}}))
    shutil.copytree(last, average)
    run = load_run(run_dir.settings_file(folder))
    for export in (last, average):
        about = {"libraries": "torch 1"}
        of_run.prove_run(export, run, folder, about, {}, is_average=export == average)
        assert main(["verify", str(export)]) == 0
    cards = [(export / statement.CARD).read_text() for export in (last, average)]
    assert "| loss | 3.25 |" in cards[0] and "| Weights |" not in cards[0]
    assert "| loss | 2.125 |" in cards[1] and "| Weights | their average" in cards[1]
    last.rename(folder / "x")
    average.rename(last)
    (folder / "x").rename(average)
    capsys.readouterr()
    for export in (last, average):
        assert main(["verify", str(export)]) == 2
        assert f"{export} is the place of the weights" in capsys.readouterr().err
    average.rename(folder / "moved")
    assert main(["verify", str(folder / "moved")]) == 0


LINK = ("Link", "![x](http://elsewhere) *\\|\x1b")


def test_the_card_shows_text_of_others_as_text() -> None:
    text = card.card(
        "a|b", {"Model": [("Name", "<script>\n`x` | y"), ("Other", None), LINK]}, {"k": "v: w"}
    )
    assert r"| Link | !\[x\](http://elsewhere) \*\\\|\\x1b |" in text
    assert "| Name | &lt;script> 'x' \\| y |" in text and "- Model: Other" in text
    assert text.splitlines()[1] == 'k: "v: w"'


def test_an_export_that_travelled_says_what_is_not_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.export(folder).rename(tmp_path / "model")
    assert main(["verify", str(tmp_path / "model")]) == 0
    output = capsys.readouterr().out
    assert "as stated    export: " in output and "not at hand  run/run.yaml" in output
    assert main(["verify", str(tmp_path / "model"), "--from", str(folder)]) == 0
    assert "as stated    run: " in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "model"), "--from", str(tmp_path)]) == 2


def a_weight(folder: Path) -> Path:
    return next(run_dir.export(folder).glob("*.safetensors"))


def a_checkpoint(folder: Path) -> Path:
    return next(run_dir.checkpoints(folder).glob("step-*/*.distcp"))


@pytest.mark.parametrize(
    "which",
    [
        a_weight,
        a_checkpoint,
        run_dir.metrics_file,
        run_dir.jobs_file,
        run_dir.settings_file,
        run_dir.result_file,
        lambda folder: run_dir.export(folder) / "tokenizer.json",
        lambda folder: run_dir.export(folder) / statement.CARD,
        lambda folder: run_dir.export(folder) / statement.CRATE,
        run_dir.accounting_file,
        run_dir.sbom_file,
    ],
    ids=[
        *("weights", "checkpoint", "metrics", "jobs", "settings", "result", "tokenizer"),
        *("card", "crate", "accounting", "sbom"),
    ],
)
def test_a_changed_byte_is_named(
    complete: Path, which: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = complete
    path = which(folder)
    change_byte(path, at=path.stat().st_size // 2)
    assert verify(folder) == 2
    assert f"atoll: {path} has changed" in capsys.readouterr().err


def test_settings_that_are_a_pipe_are_not_waited_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.settings_file(folder).unlink()
    os.mkfifo(run_dir.settings_file(folder))
    assert verify(folder) == 2
    assert "run.yaml is missing, or no plain file" in capsys.readouterr().err


@pytest.mark.login_node
def test_settings_nested_without_end_are_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A YAML parser takes hours for what is not as stated anyway."""
    run_dir.settings_file(folder).write_text("[" * 1_000_000)
    assert verify(folder) == 2
    assert "run.yaml has 1,000,000 bytes" in capsys.readouterr().err


@pytest.mark.login_node
def test_scores_that_were_measured_later_are_told_and_are_no_fault(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.scores_file(run_dir.export(folder)).write_text("{}")
    assert verify(folder) == 0
    assert "scores.json: who measured it, since the export was made" in capsys.readouterr().out


@pytest.mark.login_node
def test_a_run_that_is_called_a_campaign_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir.export(folder) / statement.NAME
    path.write_text(path.read_text().replace("urn:atoll:run:1", "urn:atoll:campaign:1"))
    assert verify(folder) == 2
    assert "is the statement of a campaign, and it lies in the folder of a run" in (
        capsys.readouterr().err
    )


def test_every_descriptor_has_what_in_toto_asks_of_one(trained: Path) -> None:
    """A digest, a uri or its content (ResourceDescriptor, v1)."""
    content = statement.read_statement(trained / "runs" / "proof" / "export")
    entries = [*content["subject"], *statement.materials_of(content), *statement.logs_of(content)]
    assert {"libraries", "code", "accounting"} <= {entry["name"] for entry in entries}
    assert all(entry.keys() & {"digest", "uri", "content"} for entry in entries)


def test_a_changed_token_is_named(
    trained: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = next(trained.glob("prepared/*/train/00000.ds"))
    before = shard.read_bytes()
    change_byte(shard)
    assert verify(folder) == 2
    assert f"atoll: {shard} has changed" in capsys.readouterr().err
    assert verify(folder, "--quick") == 0
    shard.write_bytes(before)


def test_what_is_missing_short_or_added_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, export = run_dir.metrics_file(folder), run_dir.export(folder)
    whole = log.read_bytes()
    log.write_bytes(whole[: whole.rindex(b"{")])
    assert verify(folder) == 2 and f"{log} has " in capsys.readouterr().err
    log.write_bytes(whole)
    (export / "modeling.py").write_text("print()")
    assert verify(folder) == 2 and "modeling.py is not of this export" in capsys.readouterr().err
    (export / "modeling.py").unlink()
    (export / "config.json").unlink()
    assert verify(folder) == 2 and "config.json is missing" in capsys.readouterr().err


@pytest.mark.login_node
def test_a_statement_is_signed_and_then_stays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    signers = tmp_path / "signers"
    signers.write_text("anna " + Path(f"{key}.pub").read_text())
    who = ("--quick", "--signers", str(signers), "--identity", "anna")
    assert verify(folder, *who) == 2 and "is not signed" in capsys.readouterr().err
    assert verify(folder, "--quick", "--sign", str(key)) == 0
    assert verify(folder, *who) == 0
    assert "as stated    provenance.json: signed by anna" in capsys.readouterr().out
    path = run_dir.export(folder) / statement.NAME
    path.write_text(path.read_text().replace("slurm", "Slurm").replace('"bytes": ', '"bytes":  '))
    assert verify(folder, *who) == 2
    assert "is not signed by anna" in capsys.readouterr().err


@pytest.mark.login_node
def test_the_accounting_of_jobs_comes_into_the_proof_when_they_have_ended(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verify(folder, "--quick") == 0
    assert "not at hand  accounting: said to be jobs " in capsys.readouterr().out
    sacct(tmp_path / "bin", monkeypatch, RUNNING_JOB)
    assert main(["status", str(folder)]) == 0 and not run_dir.accounting_file(folder).exists()
    sacct(tmp_path / "bin", monkeypatch, CANCELLED_JOB + ENDED_JOB)
    crate = run_dir.export(folder) / statement.CRATE
    first, stated = crate.read_bytes(), (crate.parent / statement.NAME).read_bytes()
    assert main(["status", str(folder)]) == 0
    kept = json.loads(run_dir.accounting_file(folder).read_text())["jobs"]
    assert [job["state"] for job in kept] == ["CANCELLED", "COMPLETED"]
    assert kept[1] | {"nodes": 2, "energy_joules": 7200000, "elapsed_seconds": 60} == kept[1]
    assert "1000" not in kept[0]["state"]
    assert verify(folder) == 0 and "accounting: said" not in capsys.readouterr().out
    graph = {entity["@id"]: entity for entity in json.loads(crate.read_text())["@graph"]}
    job = graph["#job-2"]
    assert job["@type"] == "CreateAction" and job["endTime"] > job["startTime"]
    used = [graph[entry["@id"]] for entry in job["resourceUsage"]]
    assert {(x["name"], x["value"], x["unitText"]) for x in used} >= {("energy", "7200000", "J")}
    assert all(x["propertyID"] and x["unitCode"].startswith("https://qudt.org/") for x in used)
    assert {"@id": "#job-2"} in graph["./"]["mentions"]
    # killed between the crate and the statement, and asked again
    (crate.parent / statement.NAME).write_bytes(stated)
    assert crate.read_bytes() != first
    assert main(["status", str(folder)]) == 0 and verify(folder) == 0


@pytest.mark.login_node
def test_a_signed_proof_and_a_changed_crate_stay_as_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = run_dir.export(folder)
    sacct(tmp_path / "bin", monkeypatch, ENDED_JOB)
    (export / statement.SIGNATURE).touch()
    before = (export / statement.NAME).read_bytes()
    assert main(["status", str(folder)]) == 0
    assert (export / statement.NAME).read_bytes() == before
    (export / statement.SIGNATURE).unlink()
    crate = export / statement.CRATE
    crate.write_text(crate.read_text().replace("Process Run Crate", "Process Run crate"))
    assert main(["status", str(folder)]) == 0
    assert (export / statement.NAME).read_bytes() == before and verify(folder) == 2


def test_what_is_in_the_image_is_kept_and_stated(complete: Path) -> None:
    names = {entry["name"] for entry in statement.materials_of(the_statement(complete))}
    assert "run/sbom.cdx.json" in names and "sbom" not in names


def test_the_line_of_a_finished_run_typed_again_leaves_its_proof(
    folder: Path, tmp_path: Path
) -> None:
    """Its job finds nothing to do, whatever image or time it was queued with."""
    image = tmp_path / "image.sif"
    image.write_bytes(b"an image")
    run = load_run(run_dir.settings_file(folder))
    folders = run.folders.model_copy(update={"runs": tmp_path})
    named = run.image.model_copy(update={"file": image})
    run = run.model_copy(update={"folders": folders, "image": named})
    run_dir.settings_file(folder).write_text(json.dumps(dumped(run)))
    keep_image(image, folder)
    of_run.prove_run(run_dir.export(folder), run, folder, {"libraries": "torch 1"}, {})
    image.write_bytes(b"another image")
    longer = run.facility.model_copy(update={"walltime_minutes": 77, "account": "ours"})
    for again in (run, run.model_copy(update={"facility": longer})):
        assert write_run_folder(Composition(again, {"seed": "command line"})) == folder
        assert verify(folder) == 0
    more = run.training.model_copy(update={"steps": 3})
    write_run_folder(Composition(run.model_copy(update={"training": more}), {}))
    assert load_run(run_dir.settings_file(folder)).training.steps == 3
    assert verify(folder) == 2


def test_a_run_that_goes_on_without_its_image_states_none(folder: Path, tmp_path: Path) -> None:
    run = load_run(run_dir.settings_file(folder))
    run = run.model_copy(update={"folders": run.folders.model_copy(update={"runs": tmp_path})})
    (tmp_path / "image.sif").write_bytes(b"an image")
    keep_image(tmp_path / "image.sif", folder)
    run_dir.result_file(folder).unlink()
    write_run_folder(Composition(run, {}))
    assert not run_dir.image_file(folder).exists()


@pytest.mark.parametrize("crate", [None, "", "{}", "[]", '{"@graph": [7]}'])
def test_a_run_is_shown_whatever_its_crate_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crate: str | None
) -> None:
    sacct(tmp_path / "bin", monkeypatch, ENDED_JOB)
    file = run_dir.export(folder) / statement.CRATE
    file.unlink()
    if crate is not None:
        file.write_text(crate)
    assert main(["status", str(folder)]) == 0 and run_dir.accounting_file(folder).is_file()
    assert verify(folder) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"jobs": [{}]}', '{"jobs": [{"job": "123"}]}'])
def test_accounting_that_is_none_ends_in_two_lines(
    folder: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.accounting_file(folder).write_text(content)
    assert main(["status", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "accounting.json cannot be read" in error and len(error.splitlines()) == 2


def test_a_file_with_a_space_in_its_name_is_a_reference_in_the_crate(folder: Path) -> None:
    export = run_dir.export(folder)
    (export / "my words#1.model").write_text("x")
    run = load_run(run_dir.settings_file(folder))
    of_run.prove_run(export, run, folder, {"libraries": "torch 1"}, {})
    graph = json.loads((export / statement.CRATE).read_text())["@graph"]
    names = {entity["@id"]: entity.get("name") for entity in graph}
    assert names["my%20words%231.model"] == "my words#1.model"
    assert verify(folder) == 0


def the_statement(folder: Path) -> dict[str, Any]:
    return statement.read_statement(run_dir.export(folder))


# of the same file as another name, or of a file of another place
OTHER_NAMES = ("run//etc/hostname", "run/./run.yaml", "run/logs/", ".")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 10**5,
        "../../key",
        "/key",
        *OTHER_NAMES,
        "run/" + "a" * 300,
        7,
        "no digest",
        "another kind",
    ],
    ids=lambda content: str(content)[:12],
)
def test_a_statement_of_another_kind_is_refused(
    content: str | int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("../../key", "/key", *OTHER_NAMES)
    if content in (*names, "run/" + "a" * 300, 7, "no digest", "another kind"):
        entry = statement.described(content, 1, "0" * 64)  # type: ignore[arg-type]
        kind = "urn:another" if content == "another kind" else "urn:atoll:run:1"
        build = {"buildType": kind, "resolvedDependencies": [entry]}
        bare = [{"name": "config.json", "digest": {}}] if content == "no digest" else []
        content = json.dumps(
            {
                "_type": statement.STATEMENT,
                "predicateType": statement.PREDICATE,
                "subject": bare,
                "predicate": {"buildDefinition": build, "runDetails": {"byproducts": []}},
            }
        )
    (tmp_path / statement.NAME).write_text(str(content))
    assert main(["verify", str(tmp_path)]) == 2
    assert "is no statement of Atoll" in capsys.readouterr().err


def test_a_statement_is_utf_8(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_dir.export(folder) / statement.NAME
    file.write_bytes(file.read_text().encode("utf-16"))
    assert verify(folder) == 2 and "is no statement of Atoll" in capsys.readouterr().err


def test_a_folder_without_a_statement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "nothing says what made this model" in capsys.readouterr().err


@pytest.mark.login_node
@pytest.mark.parametrize(
    "gone",
    ["run.yaml", "metrics.jsonl", "jobs.txt", "checkpoints/step-00000002/manifest.json",
     "sbom.cdx.json", "result.json", "image.json"],
)  # fmt: skip
def test_what_is_taken_out_of_a_run_is_named(
    complete: Path, capsys: pytest.CaptureFixture[str], gone: str
) -> None:
    (complete / gone).unlink()
    assert verify(complete) == 2
    assert f"{complete / gone} is missing" in capsys.readouterr().err


@pytest.mark.login_node
def test_checkpoints_that_were_not_kept_are_a_gap(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "checkpoints")
    assert verify(folder) == 0
    assert "not at hand  run/checkpoints/step-00000002/manifest.json" in capsys.readouterr().out


@pytest.mark.login_node
def test_a_folder_behind_a_link_is_not_of_an_export(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "templates").mkdir()
    link = run_dir.export(folder) / "additional_chat_templates"
    link.symlink_to(tmp_path / "templates")
    assert verify(folder) == 2
    assert f"{link} is not of this export" in capsys.readouterr().err


def test_a_commit_is_whole_and_says_whether_files_differ() -> None:
    assert of_run._of_code("") == {"annotations": {"commit": "unknown"}}
    assert of_run._of_code("0a" * 20) == {"digest": {"gitCommit": "0a" * 20}}
    changed = {"digest": {"gitCommit": "0a" * 20}, "annotations": {"changed since": "yes"}}
    assert of_run._of_code("0a" * 20 + "+") == changed
