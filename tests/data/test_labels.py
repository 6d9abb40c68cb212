"""Rows with labels, the tail of a file, characters as tokens, and how many documents."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from composing import ROOT
from data_runs import make_run
from tokenizers import Tokenizer, models, pre_tokenizers

from atoll import run_dir
from atoll.config.compose import compose
from atoll.data import shards
from atoll.data.encode import _labelled
from atoll.data.samples import open_samples
from atoll.data.sources import blocks, corpus
from atoll.data.tokenize import open_prepared, prepare
from atoll.errors import UserError
from atoll.settings import Classes

ROWS = [
    {"first": "the reef is red", "second": "a reef", "label": 0},
    {"first": "the wind is calm", "second": "it storms", "label": 1},
    {"first": "a lagoon " * 40, "second": "water " * 40, "label": "no"},
    {"first": "coral", "second": "", "label": 1},
]
CLASSES = {"text_fields": ["first", "second"], "label_field": "label", "labels": ["yes", "no"]}


def rows_file(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labelled(folder: Path, path: Path, **changes: Any) -> Any:
    held_out = folder / "held_out.jsonl"
    held_out.write_text(json.dumps(ROWS[0]) + "\n")
    data = {
        "files": [str(path)],
        "classes": CLASSES,
        "batching": "padding",
        "sequence_tokens": 32,
        "validation": {"files": [str(held_out)]},
    } | changes
    task = {"name": "classification"}
    tokenizer = {"kind": "wordpiece", "vocabulary_tokens": 300}
    return make_run(folder, data=data, task=task, tokenizer=tokenizer)


def test_a_blank_row_takes_its_label_with_it() -> None:
    """Where a tokenizer puts nothing around a text it has no token, and no place in an index."""
    words = Tokenizer(models.WordLevel({"reef": 0, "red": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    classes = Classes(text_fields=["text"], label_field="label", labels=["yes", "no"])
    rows = [(0, "reef red", 0), (1, "", 1), (2, "reef", 1)]
    block = _labelled(words, "uint16", classes, rows)
    assert block.lengths.tolist() == [2, 1] and block.blank == 1
    assert block.labels is not None and block.labels.tolist() == [0, 1]


def test_rows_keep_their_labels_and_their_cut(tmp_path: Path) -> None:
    run = labelled(tmp_path, rows_file(tmp_path))
    folder = prepare(run, lambda line: None)
    manifest = open_prepared(run, verify=True)
    samples = open_samples(run.data, folder, "train")
    batch = samples.batch(np.arange(4))
    assert batch.classes_B is not None and batch.classes_B.tolist() == [0, 1, 1, 1]
    assert samples.targets(np.arange(4)).tolist() == [1, 1, 1, 1]
    assert int(samples.useful(np.arange(4))[2]) == 32, "two long texts are cut together"
    first = batch.tokens_BT[2].tolist()
    assert first.count(manifest.end_id) == 2 and first[-1] == manifest.end_id


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow"])
def test_columns_of_other_files_give_the_same_rows(tmp_path: Path, suffix: str) -> None:
    run = labelled(tmp_path, rows_file(tmp_path))
    expected = open_samples(run.data, prepare(run, lambda line: None), "train").batch(np.arange(4))
    rows = [row | {"label": int(row["label"] in (1, "no"))} for row in ROWS]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        pyarrow.csv.write_csv(table, path)
    elif suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    # the same tokenizer: training one takes ties in any order
    given = {"kind": "wordpiece", "path": str(run_dir.prepared(run) / "tokenizer")}
    other = labelled(tmp_path, path)
    other = other.model_copy(update={"tokenizer": other.tokenizer.model_copy(update=given)})
    batch = open_samples(other.data, prepare(other, lambda line: None), "train").batch(np.arange(4))
    assert batch.classes_B is not None and expected.classes_B is not None
    assert batch.classes_B.tolist() == expected.classes_B.tolist()
    assert batch.tokens_BT.tolist() == expected.tokens_BT.tolist()


@pytest.mark.parametrize("label", ["2", "-1", "maybe", "0.5", ""])
def test_bad_labels_of_a_csv_file_are_named(tmp_path: Path, label: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"first,second,label\na,b,yes\nc,d,{label}\n")
    run = labelled(tmp_path, path)
    with pytest.raises(UserError, match=f"row 1 has the label '{label}'; labels are 0 to 1"):
        prepare(run, lambda line: None)


def test_scores_of_a_csv_file_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("first,second,label\na,b,0.5\nc,d,2\n")
    classes = CLASSES | {"labels": [], "metrics": ["pearson"]}
    run = labelled(tmp_path, path, classes=classes)
    (tmp_path / "held_out.jsonl").write_text(json.dumps(ROWS[0] | {"label": 1.5}) + "\n")
    folder = prepare(run, lambda line: None)
    found = open_samples(run.data, folder, "train").batch(np.arange(2)).classes_B
    assert found is not None and found.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"first": "a", "second": "b", "label": 2}, "row 4 has the label 2"),
        ({"first": "a", "second": "b", "label": -1}, "row 4 has the label -1"),
        ({"first": "a", "second": "b", "label": "maybe"}, "row 4 has the label 'maybe'"),
        ({"first": "a", "label": 1}, "rows.jsonl:5: no value in the field 'second'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], found: str) -> None:
    run = labelled(tmp_path, rows_file(tmp_path, [*ROWS, row]))
    with pytest.raises(UserError, match=found.replace("(", r"\(")):
        prepare(run, lambda line: None)


def test_changed_labels_are_found(tmp_path: Path) -> None:
    run = labelled(tmp_path, rows_file(tmp_path))
    folder = prepare(run, lambda line: None)
    path = shards.labels_file(folder, "train", 0)
    path.write_bytes(np.array([1, 1, 1, 1], "<f4").tobytes())
    with pytest.raises(UserError, match=r"labels is corrupted"):
        open_prepared(run, verify=True)


def test_scores_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = [row | {"label": score} for row, score in zip(ROWS, (0.5, 2, 4.25, 5.0), strict=True)]
    classes = CLASSES | {"labels": [], "metrics": ["pearson"]}
    run = labelled(tmp_path, rows_file(tmp_path, rows), classes=classes)
    folder = prepare(run, lambda line: None)
    found = open_samples(run.data, folder, "train").batch(np.arange(4)).classes_B
    assert found is not None and found.tolist() == [0.5, 2.0, 4.25, 5.0]


def test_the_end_of_a_file_is_held_out_character_by_character(tmp_path: Path) -> None:
    text = "".join(f"{n}: wörds and wörds;\n" for n in range(1000))
    path = tmp_path / "text.txt"
    path.write_text(text)
    data = {
        "files": [str(path)],
        "document": "file",
        "packing": "concat",
        "sequence_tokens": 16,
        "validation": {"tail": 0.1},
    }
    run = make_run(tmp_path, data=data, tokenizer={"kind": "characters"})
    folder = prepare(run, lambda line: None)
    manifest = open_prepared(run, verify=True)
    cut = int(len(text) * 0.9)
    assert manifest.tokens("train") == cut and manifest.tokens("validation") == len(text) - cut
    assert manifest.vocabulary_tokens == len(set(text)) and manifest.end_id is None
    tokens = np.fromfile(shards.tokens_file(folder, "validation", 0), "<u2")
    known = sorted(set(text))
    assert "".join(known[token] for token in tokens) == text[cut:]


@pytest.mark.parametrize(("count", "documents"), [(0, 20), (None, 20), (7, 7)])
def test_zero_documents_means_all(tmp_path: Path, count: int | None, documents: int) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of many\n" for n in range(20)))
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("one line\nanother line\nthe third line\n")
    data = {
        "files": [str(path)],
        "document": "line",
        "max_documents": count,
        "validation": {"files": [str(held_out)], "max_documents": 2},
    }
    run = make_run(tmp_path, data=data)
    prepare(run, lambda line: None)
    manifest = open_prepared(run)
    assert (manifest.documents("train"), manifest.documents("validation")) == (documents, 2)
    assert run_dir.prepared(run).is_dir()


def test_glue_s_own_tsv_files_are_read_as_they_come(tmp_path: Path) -> None:
    """As download_glue_data.py leaves them: a header, tabs, and quotes that quote nothing."""
    header = "index\tsentence1\tsentence2\tlabel\n"
    rows = (
        '0\tHe said "no.\tHe refused.\tentailment\n',
        '1\t"Yes," she said.\tShe said "maybe.\tnot_entailment\n',
        "2\tNo quotes\tat all\tentailment\n",
    )
    folder = tmp_path / "RTE"
    folder.mkdir()
    (folder / "train.tsv").write_text(header + "".join(rows))
    (folder / "dev.tsv").write_text(header + rows[1])
    words = [f"data.files=[{folder}/train.tsv]", f"data.validation.files=[{folder}/dev.tsv]"]
    data = compose([*GLUE_TSV, *words], ROOT / "hydra_conf").run.data
    text = corpus.train_corpus(data)
    [block] = blocks.blocks(text, 100)
    assert blocks.read(text, block) == [
        ['He said "no.', '"Yes," she said.', "No quotes"],
        ["He refused.", 'She said "maybe.', "at all"],
        ["entailment", "not_entailment", "entailment"],
    ]
    quoted = data.model_copy(update={"quotes": True})
    with pytest.raises(UserError, match=r"train\.tsv:\d: not tsv") as caught:
        list(blocks.blocks(corpus.train_corpus(quoted), 100))
    assert "data.quotes=false" in caught.value.hint


GLUE_TSV = ["facility=laptop", "experiment=bert_rte", "data.source=files", "data.hub=null"]
GLUE_TSV += ["data.quotes=false", "data.validation.split=null"]
