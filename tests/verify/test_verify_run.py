"""A run's export against its provenance.json: every kind of change is named."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import small_run
from rank_pool import RankPool

from atoll import run_dir
from atoll.__main__ import main
from atoll.proof import card, statement


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


def test_the_card_shows_text_of_others_as_text() -> None:
    text = card.card(
        "a|b", {"Model": [("Name", "<script>\n`x` | y"), ("Other", None)]}, {"k": "v: w"}
    )
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
    ],
    ids=["weights", "checkpoint", "metrics", "jobs", "settings", "result", "tokenizer"],
)
def test_a_changed_byte_is_named(
    folder: Path, which: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = which(folder)
    change_byte(path, at=path.stat().st_size // 2)
    assert verify(folder) == 2
    assert f"atoll: {path} has changed" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "[" * 10**5, "../../key", "/key", 7, "no digest", "another kind"],
    ids=lambda content: str(content)[:12],
)
def test_a_statement_of_another_kind_is_refused(
    content: str | int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content in ("../../key", "/key", 7, "no digest", "another kind"):
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


def test_a_folder_without_a_statement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "nothing says what made this model" in capsys.readouterr().err
