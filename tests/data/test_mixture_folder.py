"""Several sources prepared: one tokenizer, folders that runs share, batches of all of them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import defaults
import numpy as np
import pytest
import yaml
from chat_templates import TALK, TEMPLATES
from data_runs import content, make_run, prose, write_lines

from atoll import run_dir
from atoll.config.bundle import with_bundle
from atoll.data import shards
from atoll.data.loader import batches_ahead, refuse_early_end
from atoll.data.mixture import mixture_of
from atoll.data.samples import open_samples, samples_of
from atoll.data.tokenize import open_prepared, prepare
from atoll.errors import UserError
from atoll.models.fetch import main as fetch
from atoll.settings import Run, checked, dumped

SEQUENCE = 48


def quiet(_: str) -> None:
    """A log that nobody reads."""


def mixed_run(folder: Path, sources: list[dict[str, Any]], **others: Any) -> Run:
    data = {"name": "mix", "document": "line", "documents_per_shard": 20, "workers": 1}
    return make_run(folder, data | {"sequence_tokens": SEQUENCE, "sources": sources}, **others)


def two_sources(folder: Path, *weights: Any) -> list[dict[str, Any]]:
    """A text of short lines, and one of long ones with letters of its own."""
    write_lines(folder / "short.txt", 90, words=6)
    (folder / "long.txt").write_text("\n".join(prose(n, 40) + " ÆØ" for n in range(70)))
    names = zip(("short", "long"), weights or (3, 1), strict=True)
    return [{"name": n, "files": str(folder / f"{n}.txt"), "weight": w} for n, w in names]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("mixed")
    run = mixed_run(folder, two_sources(folder, {0: 3, 4: 0.5}, 1))
    prepare(run, quiet)
    return run


def test_every_source_has_a_folder_and_all_share_one_tokenizer(mixed: Run) -> None:
    folder, folders = run_dir.prepared(mixed), run_dir.prepared_sources(mixed)
    assert [path.name.partition("-")[0] for path in (folder, *folders)] == ["mix", "short", "long"]
    open_prepared(mixed, verify=True)
    whole = json.loads(shards.manifest_file(folder).read_text())
    manifests = [shards.read_manifest(path) for path in folders]
    assert {m.tokenizer_sha256 for m in manifests} == {whole["tokenizer_sha256"]}
    assert [m.documents("train") + m.documents("validation") for m in manifests] == [90, 70]


def test_a_made_tokenizer_has_seen_every_source(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    run = mixed_run(tmp_path, sources, tokenizer={"kind": "characters"})
    known = json.loads((prepare(run, quiet) / "tokenizer" / "tokenizer.json").read_text())
    assert {"Æ", "a"} <= set(known["model"]["vocab"])


def test_a_run_that_has_trained_keeps_its_tokens_when_a_text_changes(tmp_path: Path) -> None:
    """It is refused before the tokenizer of all is made anew, and with it their tokens."""
    run = mixed_run(tmp_path, two_sources(tmp_path), name="x")
    folder = prepare(run, quiet)
    folders = run_dir.prepared_sources(run)
    plans = [shards.read_manifest(path).input_fingerprints for path in folders]
    progress = {"texts": [shards.text_digest(plan) for plan in plans]}
    whole = run_dir.checkpoint(run_dir.folder(run), 3) / "manifest.json"
    run_dir.write_whole(whole, json.dumps({"progress": progress}))
    kept = [shards.manifest_file(path).stat().st_ino for path in (folder, *folders)]
    (tmp_path / "long.txt").write_text("\n".join(prose(n, 40) + " ÆÅ" for n in range(70)))
    with pytest.raises(UserError, match=r"source long: .*its text has changed since"):
        prepare(run, quiet)
    assert kept == [shards.manifest_file(path).stat().st_ino for path in (folder, *folders)]


def test_weights_and_other_runs_take_the_same_tokens(mixed: Run) -> None:
    values = dumped(mixed)
    for source in values["data"]["sources"]:
        source |= {"weight": 7, "max_epochs": 2}
    other = checked(values)
    assert run_dir.prepared(other) == run_dir.prepared(mixed)
    said: list[str] = []
    prepare(other, said.append)
    assert len(said) == 2 and all("tokens are ready" in line for line in said)


def test_a_source_is_prepared_as_a_run_on_it_alone(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    known = mixed_run(tmp_path / "a", sources)
    tokenizer = {"path": str(prepare(known, quiet) / "tokenizer")}
    mixed = mixed_run(tmp_path / "b", sources, tokenizer=tokenizer)
    prepare(mixed, quiet)
    for source, own in zip(sources, run_dir.prepared_sources(mixed), strict=True):
        data = {k: v for k, v in dumped(mixed)["data"].items() if k != "sources"}
        alone = make_run(
            tmp_path / "b",
            data | {"name": source["name"], "files": source["files"]},
            tokenizer=tokenizer,
        )
        assert run_dir.prepared(alone) == own
        assert prepare(alone, quiet) == own


def test_one_source_is_the_run_without_sources(tmp_path: Path) -> None:
    [source, _] = two_sources(tmp_path)
    mixed = mixed_run(tmp_path, [source])
    prepare(mixed, quiet)
    [own] = run_dir.prepared_sources(mixed)
    alone = open_samples(mixed.data, own, "train")
    tokens = [
        [batch.tokens_BT.tolist() for share in shares for batch in share.microbatches]
        for samples, run in ((samples_of(mixed, "train"), mixed), (alone, without_sources(mixed)))
        for shares in [taken(samples, run, 0, 30)]
    ]
    assert tokens[0] == tokens[1]


def without_sources(run: Run) -> Run:
    return run.model_copy(update={"data": run.data.each[0]})


def taken(samples: Any, run: Run, position: int, steps: int, rank: int = 0) -> list[Any]:
    with batches_ahead(samples, run, position, steps, rank) as shares:
        return list(shares)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_together_see_the_same_batches(mixed: Run, ranks: int) -> None:
    sharding = {"name": "ddp", "layouts": ["ddp"]}
    training = defaults.group("training", global_batch_samples=16, microbatch_samples=2)
    wide = mixed.model_validate(
        mixed.model_dump() | {"ranks_per_node": ranks, "sharding": sharding, "training": training}
    )
    samples = samples_of(mixed, "train")
    alone = mixed.model_copy(update={"training": wide.training})
    expected = taken(samples, alone, 0, 8)
    own = [taken(samples, wide, 0, 8, rank) for rank in range(ranks)]
    for step, whole in enumerate(expected):
        rows = [row for b in whole.microbatches for row in b.tokens_BT.tolist()]
        shares = [share[step] for share in own]
        together = [r for s in shares for b in s.microbatches for r in b.tokens_BT.tolist()]
        assert sorted(together) == sorted(rows)
        assert {(s.global_targets, s.global_useful) for s in shares} == {
            (whole.global_targets, whole.global_useful)
        }
        assert all(share.epochs == whole.epochs for share in shares)


def test_a_position_is_all_the_state(mixed: Run) -> None:
    samples, size = samples_of(mixed, "train"), mixed.training.global_batch_samples
    whole, resumed = taken(samples, mixed, 0, 60), taken(samples, mixed, 35 * size, 25)
    for a, b in zip(whole[35:], resumed, strict=True):
        assert [x.tokens_BT.tolist() for x in a.microbatches] == [
            x.tokens_BT.tolist() for x in b.microbatches
        ]
    assert whole[-1].epochs == resumed[-1].epochs
    assert min(whole[-1].epochs.values()) > 1, "every source was read more than once"


def test_batches_hold_each_source_by_its_weight_of_tokens(mixed: Run) -> None:
    samples = samples_of(mixed, "train")
    order, size = mixture_of(samples, mixed), mixed.training.global_batch_samples
    assert order is not None
    ids = order.ids(4 * size, 2000)
    tokens = [samples.useful(ids[np.isin(ids, own)]).sum() for own in samples.ids_of_sources]
    assert tokens[0] / sum(tokens) == pytest.approx(0.5 / 1.5, abs=0.01)


def test_conversations_are_mixed_with_text(tmp_path: Path) -> None:
    rows = [json.dumps({"messages": TALK}) for _ in range(30)]
    (tmp_path / "talks.jsonl").write_text("\n".join(rows))
    sources = [
        *two_sources(tmp_path)[:1],
        {"name": "talks", "files": str(tmp_path / "talks.jsonl"), "format": "chat"},
    ]
    made = {"chat_template": TEMPLATES["chatml"], "add_tokens": ["<|im_start|>", "<|im_end|>"]}
    run = mixed_run(tmp_path, sources, tokenizer=made)
    run = run.model_copy(update={"data": run.data.model_copy(update={"sequence_tokens": 256})})
    prepare(run, quiet)
    samples = samples_of(run, "train")
    text, talks = samples.ids_of_sources
    segments = [samples.plan.sample_first_piece[own + 1] - samples.plan.sample_first_piece[own]
                for own in (text, talks)]  # fmt: skip
    assert (samples.targets(text) == samples.useful(text) - segments[0]).all()
    assert (samples.targets(talks) < samples.useful(talks) - segments[1]).all()
    for own in (text, talks):
        assert int((samples.batch(own).labels_BT != -100).sum()) == samples.targets(own).sum()


def test_a_mistake_names_the_source_and_the_record(tmp_path: Path) -> None:
    good = two_sources(tmp_path)[0]
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 6 + '{"text": "cut sho')
    run = mixed_run(tmp_path, [good, {"name": "rows", "files": str(tmp_path / "rows.jsonl")}])
    with pytest.raises(UserError, match=r"^source rows: .*rows\.jsonl:7: not JSON"):
        prepare(run, quiet)
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(UserError, match=r"^source rows: .* holds no text"):
        prepare(run, quiet)


def test_a_source_that_ends_early_is_refused_with_the_step(mixed: Run) -> None:
    values = dumped(mixed)
    values["data"]["sources"][1]["max_epochs"] = 1.5
    run, samples = checked(values), samples_of(mixed, "train")
    with pytest.raises(UserError, match=r"source long ends early: .* \(max_epochs=1\.5\)") as error:
        refuse_early_end(samples, run, 1000)
    last = int(error.value.hint.split("=")[1].partition(",")[0])
    refuse_early_end(samples, run, last)
    with pytest.raises(UserError, match="ends early"):
        refuse_early_end(samples, run, last + 1)


def test_a_source_made_anew_is_noticed(tmp_path: Path) -> None:
    run = mixed_run(tmp_path, two_sources(tmp_path))
    prepare(run, quiet)
    path = shards.manifest_file(run_dir.prepared_sources(run)[1])
    path.write_text(path.read_text() + " ")
    with pytest.raises(UserError, match=r"source long: .*manifest\.json is no more as it was"):
        open_prepared(run)


def test_a_kill_loses_no_whole_shard_of_any_source(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    write_lines(tmp_path / "short.txt", 400)
    run = mixed_run(tmp_path, sources)
    run = run.model_copy(update={"data": run.data.model_copy(update={"documents_per_shard": 5})})
    settings = run_dir.settings_file(run_dir.folder(run))
    settings.parent.mkdir(parents=True)
    settings.write_text(yaml.safe_dump(dumped(run)))
    command = [sys.executable, "-m", "atoll", "tokenize", str(settings.parent)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    prepared = run.folders.prepared
    expected = {path.name: content(path) for path in prepared.iterdir()}
    prepared.rename(tmp_path / "reference")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    short = run_dir.prepared_sources(run)[0]

    def whole_shards() -> set[str]:
        parts = (short.glob(f"{split}/*.json") for split in ("train", "validation"))
        train, validation = ({path.stem for path in paths} for paths in parts)
        return train & validation

    while len(whole_shards()) < 8:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = whole_shards()
    kept = [path for path in short.glob("train/*.ds") if path.stem in whole]
    inodes = {path: path.stat().st_ino for path in kept}
    said: list[str] = []
    prepare(run, said.append)
    assert {path.name: content(path) for path in prepared.iterdir()} == expected
    assert {path: path.stat().st_ino for path in kept} == inodes and len(kept) >= 8
    assert any("tokenised 400 of 400 documents" in line for line in said), said


def test_a_bundle_carries_every_source(tmp_path: Path) -> None:
    run = mixed_run(tmp_path, two_sources(tmp_path))
    prepare(run, quiet)
    bundle = tmp_path / "bundle"
    run_dir.write_whole(run_dir.bundle_request(bundle), yaml.safe_dump(dumped(run)))
    assert fetch([str(bundle)]) == 0
    folders = run.folders.model_copy(update={"bundle": bundle, "prepared": tmp_path / "none"})
    away = with_bundle(run.model_copy(update={"folders": folders}))
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    prepare(away, quiet)
    open_prepared(away, verify=True)
    own, bundled = (taken(samples_of(each, "train"), each, 0, 20) for each in (run, away))
    for a, b in zip(own, bundled, strict=True):
        assert [x.tokens_BT.tolist() for x in a.microbatches] == [
            x.tokens_BT.tolist() for x in b.microbatches
        ]
    values = dumped(run)
    values["data"]["sources"][0]["template"] = "say: {text}"
    other = checked(values).model_copy(update={"folders": folders})
    with pytest.raises(UserError, match="was made with data="):
        with_bundle(other)
