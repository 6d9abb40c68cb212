"""Preparing tokens: the same bytes however it is done, whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from data_runs import content, make_run, prose, write_lines
from transformers import AutoTokenizer

from atoll import run_dir
from atoll.data import shards, text_folder
from atoll.data.sources import blocks
from atoll.data.tokenize import main, open_prepared, prepare
from atoll.errors import UserError
from atoll.settings import Run, dumped

LINES = {"document": "line", "documents_per_shard": 16}


def quiet(_: str) -> None:
    """A log that nobody reads."""


def run_on_lines(tmp_path: Path, count: int = 100, **data: Any) -> Run:
    path = tmp_path / "text.txt"
    if not path.exists():
        write_lines(path, count)
    return make_run(tmp_path, LINES | {"files": [str(path)]} | data)


def read_as_datatrove(path: Path) -> list[list[int]]:
    """Documents of one shard, by the published layout alone."""
    name, token_bytes = Path(f"{path}.metadata").read_text().split("\n")[0].split("|")
    assert name
    tokens = np.fromfile(path, dtype={"2": "<u2", "4": "<u4"}[token_bytes])
    ends = np.fromfile(f"{path}.index", dtype="<u8").astype(int)
    assert ends[-1] == len(tokens)
    return [part.tolist() for part in np.split(tokens, ends[:-1])]


def test_a_tokenizer_that_was_not_saved_whole_is_made_again(tmp_path: Path) -> None:
    folder = prepare(run_on_lines(tmp_path), quiet)
    whole = content(folder)
    shards.manifest_file(folder).unlink()
    (folder / ".tokenizer.partial").mkdir()
    (folder / ".tokenizer.partial" / "tokenizer.json").write_text("{")
    assert content(prepare(run_on_lines(tmp_path), quiet)) == whole


def test_shards_hold_the_documents_in_the_layout_of_datatrove(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "text.txt", 100)
    run = run_on_lines(tmp_path, template="write: {text} {text}!")
    folder = prepare(run, quiet)
    manifest = open_prepared(run, verify=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    found: dict[str, list[str]] = {}
    for split in shards.SPLITS:
        documents = [
            document
            for path in sorted((folder / split).glob("*.ds"))
            for document in read_as_datatrove(path)
        ]
        assert {document[-1] for document in documents} == {tokenizer.eos_token_id}
        assert manifest.documents(split) == len(documents)
        assert manifest.tokens(split) == sum(map(len, documents))
        found[split] = [tokenizer.decode(document[:-1]) for document in documents]
    expected = [f"write: {line} {line}!" for line in lines]
    assert sorted(found["train"] + found["validation"]) == sorted(expected)
    assert 5 < len(found["validation"]) < 40
    assert found["train"] == [text for text in expected if text in set(found["train"])]
    assert manifest.vocabulary_tokens == len(tokenizer) == 300
    largest = max(shard.largest_token for s in shards.SPLITS for shard in manifest.shards(s))
    assert 256 < largest < 300


def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_DOCUMENTS", 5)
    found = []
    for workers in (1, 2, 3):
        write_lines(tmp_path / "text.txt", 100)
        run = run_on_lines(tmp_path, workers=workers)
        apart = run.model_copy(
            update={"folders": run.folders.model_copy(update={"prepared": tmp_path / str(workers)})}
        )
        found.append(content(prepare(apart, quiet)))
    assert found[0] == found[1] == found[2]
    assert "train/00006.ds" in found[0]


def test_validation_of_its_own_files_keeps_all_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "held_out.txt", 20, seed=1000)
    run = run_on_lines(tmp_path, validation={"files": [str(tmp_path / "held_out.txt")]})
    prepare(run, quiet)
    manifest = open_prepared(run)
    assert (manifest.documents("train"), manifest.documents("validation")) == (100, 20)


def test_a_limit_on_documents_is_kept(tmp_path: Path) -> None:
    run = run_on_lines(tmp_path, max_documents=30)
    prepare(run, quiet)
    manifest = open_prepared(run)
    assert manifest.documents("train") + manifest.documents("validation") == 30


def test_blank_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join([prose(n, 9) + "\n  " for n in range(40)]))
    run = run_on_lines(tmp_path)
    prepare(run, quiet)
    manifest = open_prepared(run)
    assert manifest.documents("train") + manifest.documents("validation") == 40
    assert manifest.blank("train") + manifest.blank("validation") == 40


def start_preparing(run: Run, tmp_path: Path) -> subprocess.Popen[bytes]:
    settings = run_dir.settings_file(tmp_path / "runs" / "run")
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(yaml.safe_dump(dumped(run)))
    command = [sys.executable, "-m", "atoll", "tokenize", str(settings.parent)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def children_of(process: int) -> list[int]:
    """The processes that descend from one, children first."""
    tree = [process]
    for parent in tree:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            tree += [int(child) for child in task.read_text().split()]
    return tree[1:]


def wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process}/exe").exists() for process in processes):
        assert time.monotonic() < deadline, "processes outlive the one that asked"
        time.sleep(0.01)


def inodes_of_finished_shards(folder: Path) -> dict[Path, int]:
    """Shards whose record is there for both splits: nothing of them is written again."""
    both = {path.stem for path in folder.glob("train/*.json")}
    both &= {path.stem for path in folder.glob("validation/*.json")}
    paths = [path for path in folder.glob("train/*.ds") if path.stem in both]
    return {path: path.stat().st_ino for path in paths}


def test_a_kill_at_any_moment_leaves_whole_files_and_is_taken_up_again(tmp_path: Path) -> None:
    write_lines(tmp_path / "text.txt", 400)
    run = run_on_lines(tmp_path, documents_per_shard=5, workers=2)
    expected = content(prepare(run, quiet))
    folder = run_dir.prepared(run)
    folder.rename(tmp_path / "reference")
    finished: dict[Path, int] = {}
    for records in (1, 10, 40):
        process = start_preparing(run, tmp_path)
        while len(list(folder.glob("train/*.json"))) < records:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.001)
        descendants = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert descendants
        wait_until_gone(descendants)
        visible = {n: h for n, h in content(folder).items() if not n.endswith(".partial")}
        assert visible.items() < expected.items()
        assert not shards.manifest_file(folder).exists()
        with pytest.raises(UserError, match=r"manifest\.json is missing"):
            open_prepared(run)
        assert all(path.stat().st_ino == inode for path, inode in finished.items())
        finished = inodes_of_finished_shards(folder)
        assert len(finished) >= records - 1
    prepare(run, quiet)
    assert content(folder) == expected
    assert all(path.stat().st_ino == inode for path, inode in finished.items())


@pytest.mark.parametrize("records", [0, 3])
def test_an_interrupt_ends_every_process_and_is_taken_up_again(
    tmp_path: Path, records: int
) -> None:
    """Ctrl-C while the tokenizer is made, or the shards."""
    write_lines(tmp_path / "text.txt", 400)
    run = run_on_lines(tmp_path, documents_per_shard=5, workers=2)
    folder = run_dir.prepared(run)
    process = start_preparing(run, tmp_path)
    while not (
        len(list(folder.glob("train/*.json"))) >= records if records else children_of(process.pid)
    ):
        assert process.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.001)
    descendants = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    wait_until_gone(descendants)
    assert not shards.manifest_file(folder).exists()
    prepare(run, quiet)
    open_prepared(run, verify=True)


def test_two_at_once_do_the_work_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "text.txt", 60)
    run = run_on_lines(tmp_path)
    processes = [start_preparing(run, tmp_path) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    found = content(run_dir.prepared(run))
    assert not [name for name in found if name.endswith(".partial")]
    open_prepared(run, verify=True)


def test_prepared_tokens_are_not_made_again_until_the_text_changes(tmp_path: Path) -> None:
    run = run_on_lines(tmp_path)
    folder = prepare(run, quiet)
    before = shards.manifest_file(folder).stat().st_ino
    said: list[str] = []
    prepare(run, said.append)
    assert said == [f"tokens are ready: {folder}"]
    assert shards.manifest_file(folder).stat().st_ino == before
    write_lines(tmp_path / "text.txt", 50, seed=9)
    prepare(run, quiet)
    manifest = open_prepared(run, verify=True)
    assert manifest.documents("train") + manifest.documents("validation") == 50


def test_the_tokens_of_a_run_that_has_trained_are_not_made_of_another_text(tmp_path: Path) -> None:
    """Its position in the samples would be another one; its name is what it is known by."""
    run = run_on_lines(tmp_path)
    folder = prepare(run, quiet)
    plan = shards.read_plan(folder)
    assert plan is not None
    progress = {"texts": [shards.text_digest(plan.input_fingerprints)]}
    whole = run_dir.checkpoint(run_dir.folder(run), 3) / "manifest.json"
    run_dir.write_whole(whole, json.dumps({"progress": progress}))
    prepare(run, quiet)
    before = shards.manifest_file(folder).stat().st_ino
    text = (tmp_path / "text.txt").read_text()
    write_lines(tmp_path / "text.txt", 50, seed=9)
    with pytest.raises(UserError, match="has trained 3 steps, and its text has changed since"):
        prepare(run, quiet)
    assert shards.manifest_file(folder).stat().st_ino == before
    prepare(run.model_copy(update={"name": "another"}), quiet)
    assert shards.manifest_file(folder).stat().st_ino != before
    kept = whole.read_bytes()
    whole.write_text("{")  # the ranks set a damaged one aside, and judge the one before it
    write_lines(tmp_path / "text.txt", 51, seed=9)
    prepare(run, quiet)
    whole.write_bytes(kept)
    (tmp_path / "text.txt").write_text(text)
    prepare(run, quiet)  # it is back, whatever the other run has made of the folder meanwhile
    write_lines(tmp_path / "text.txt", 50, seed=9)
    run_dir.write_whole(run_dir.result_file(run_dir.folder(run)), "{}")
    with pytest.raises(UserError, match="its text has changed since"):
        prepare(run, quiet)  # its export is to have the tokenizer that it was trained with
    run_dir.export(run_dir.folder(run)).mkdir()
    prepare(run, quiet)  # no sample is taken any more


@pytest.mark.parametrize("is_there", [True, False])
def test_whole_tokens_are_used_without_writing_into_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """They may be a colleague's; and what is not whole is still made under a lock."""
    run = run_on_lines(tmp_path)
    if is_there:
        prepare(run, quiet)
    locks: list[Path] = []
    lock = text_folder.locked

    def recorded(folder: Path, log: Any) -> Any:
        locks.append(folder)
        return lock(folder, log)

    monkeypatch.setattr(text_folder, "locked", recorded)
    assert locks == ([] if prepare(run, quiet) and is_there else [run_dir.prepared(run)])


def test_who_waited_for_a_folder_of_which_nothing_came_makes_it(tmp_path: Path) -> None:
    folder, waits, found = tmp_path / "prepared", threading.Event(), []
    folder.mkdir()

    def wait() -> None:
        with text_folder.locked(folder, lambda _: waits.set()):
            found.append(folder.is_dir())

    waiting = threading.Thread(target=wait)
    with pytest.raises(UserError, match="no text"), text_folder.locked(folder, quiet):
        waiting.start()
        assert waits.wait(60)
        raise UserError("no text", "give some")
    waiting.join()
    assert found == [True]


def test_tokens_outlive_their_text(tmp_path: Path) -> None:
    run = run_on_lines(tmp_path)
    folder = prepare(run, quiet)
    (tmp_path / "text.txt").unlink()
    said: list[str] = []
    assert prepare(run, said.append) == folder
    assert "out of reach" in said[0]
    shards.manifest_file(folder).unlink()
    with pytest.raises(UserError, match="no such file"):
        prepare(run, quiet)


@pytest.mark.parametrize("name", ["train/00001.ds", "validation/00000.ds.index"])
def test_a_damaged_shard_is_named_and_made_again(tmp_path: Path, name: str) -> None:
    run = run_on_lines(tmp_path)
    folder = prepare(run, quiet)
    expected = content(folder)
    path = folder / name
    whole = path.read_bytes()

    path.write_bytes(whole[:2] + bytes([whole[2] ^ 1]) + whole[3:])
    open_prepared(run)
    with pytest.raises(UserError, match=f"{name} is corrupted"):
        open_prepared(run, verify=True)

    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=f"{name} has {len(whole) - 1} bytes instead of"):
        open_prepared(run)

    path.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        open_prepared(run)
    prepare(run, quiet)
    assert content(folder) == expected


def test_ranks_share_the_verification(tmp_path: Path) -> None:
    run = run_on_lines(tmp_path)
    folder = prepare(run, quiet)
    path = folder / "train" / "00000.ds"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    noticed = []
    for rank in range(3):
        try:
            open_prepared(run, verify=True, rank=rank, world_size=3)
        except UserError as error:
            noticed.append((rank, "00000.ds is corrupted" in error.found))
    assert noticed == [(0, True)]


def test_a_manifest_of_another_version_or_damaged_is_refused(tmp_path: Path) -> None:
    run = run_on_lines(tmp_path)
    path = shards.manifest_file(prepare(run, quiet))
    values = json.loads(path.read_text())
    for changed, found in (
        (values | {"format_version": 99}, "format version 99"),
        (values | {"end_id": "x"}, "damaged: end_id"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=found):
            open_prepared(run)
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        open_prepared(run)


@pytest.mark.parametrize("count", [1, 3])
def test_a_split_without_documents_is_refused_with_the_numbers(tmp_path: Path, count: int) -> None:
    write_lines(tmp_path / "text.txt", count)
    run = run_on_lines(tmp_path, validation={"fraction": 1e-6})
    with pytest.raises(UserError, match=f"validation split is empty: .* 0 of {count}") as caught:
        prepare(run, quiet)
    assert "data.document=paragraph" in caught.value.hint
    assert "data.validation.fraction" in caught.value.hint


def test_a_split_of_blank_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n \n\t\n")
    run = run_on_lines(tmp_path, validation={"files": [str(tmp_path / "blank.txt")]})
    with pytest.raises(UserError, match="all of its 3 documents are blank"):
        prepare(run, quiet)
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        open_prepared(run)


def test_a_mistake_found_by_a_worker_reaches_the_user(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": prose(n, 9)}) for n in range(20)]
    path.write_text("\n".join([*rows, "{broken"]))
    run = make_run(tmp_path, {"files": [str(path)]}, {"training_documents": 5})
    with pytest.raises(UserError, match=r"rows\.jsonl:21: not JSON"):
        prepare(run, quiet)


def test_too_small_a_disk_is_seen_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on_lines(tmp_path)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"100 bytes free, at least [\d,]+ needed"):
        prepare(run, quiet)
    assert not shards.tokenizer_folder(run_dir.prepared(run)).exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = run_on_lines(tmp_path)
    expected = content(prepare(run, quiet))
    folder = run_dir.prepared(run)
    for path in (shards.manifest_file(folder), folder / "train" / "00003.ds"):
        path.unlink()
    calls = iter(range(100))

    def fsync(_: int) -> None:
        if next(calls) == 2:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        with pytest.raises(UserError, match=r"bytes free, about [\d,]+ needed"):
            prepare(run, quiet)
    found = content(folder)
    assert found.items() < expected.items()
    prepare(run, quiet)
    assert content(folder) == expected


def test_the_command_prepares_and_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_on_lines(tmp_path)
    settings = run_dir.settings_file(tmp_path / "runs" / "run")
    settings.parent.mkdir(parents=True)
    settings.write_text(yaml.safe_dump(dumped(run)))
    assert main([str(settings.parent), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "tokenised 100 of 100 documents" in said
    assert "every shard matches its sha256" in said
